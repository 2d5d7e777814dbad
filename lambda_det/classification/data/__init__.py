"""Labelled images for classification: sources, augmentation, batches."""
