"""Files of weights: safe readers, tensor names, provenance, backbone files."""
