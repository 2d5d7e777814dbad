"""Packaging of lambda_det: `pip install .`, or `pip install -e .` to work on it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = r'^__version__ = "([^"]+)"$'

setup(
    name="lambda_det",
    # Read, not imported: importing lambda_det needs torch.
    version=re.search(VERSION, (ROOT / "lambda_det/version.py").read_text("utf-8"), re.M).group(1),
    description="LambdaNetworks for Detectron2: backbones, Mask R-CNN and ImageNet pretraining",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # configs/ lies at the top, where users of Detectron2 look for it, and is lambda_det/configs in
    # the wheel.
    packages=[*find_packages(include=["lambda_det", "lambda_det.*"]), "lambda_det.configs"],
    package_dir={"lambda_det.configs": "configs"},
    package_data={
        "lambda_det": ["py.typed"],
        "lambda_det.configs": ["**/*.yaml", "**/*.py"],
        "lambda_det.native": ["*.cpp", "*.h"],
        "lambda_det.weights": ["files/*.pth"],
    },
    # Detectron2 is not listed: it is not on PyPI, and a requirement with a git address would fail
    # wherever only a package registry can be reached. tools/install_detectron2.py brings it.
    install_requires=[
        "torch>=2.4",
        "torchvision>=0.19",
        "numpy>=1.26",
        # opencv-python would need libGL of the system, which servers lack.
        "opencv-python-headless>=4.8",
        "pillow>=9.4",
        "pycocotools>=2.0.7",
        "safetensors>=0.4",
        # Locks the folder of a run; torch needs it, too.
        "filelock>=3.12",
        # Decodes a JPEG bit for bit as Pillow does, in four fifths of the time.
        "simplejpeg>=1.8",
        # TensorFlow's RMSProp, and teachers for pseudo-labels.
        "timm>=1.0.12",
        # Downloads published weights; timm needs it, too.
        "huggingface_hub>=0.17",
        # The fixed-size crop of polygons imports it, and no Detectron2 asks for it.
        "shapely>=2.0",
        # What Detectron2 itself imports.
        "cloudpickle",
        "fvcore>=0.1.5.post20221221,<0.1.6",
        "hydra-core>=1.1",
        "iopath>=0.1.9",
        "matplotlib>=3.6",
        "omegaconf>=2.1",
        "packaging",
        "pyyaml>=5.1",
        "scipy>1.5.1",
        "tabulate",
        "tensorboard",
        "termcolor>=1.1",
        "tqdm>4.29.0",
        "yacs>=0.1.8",
    ],
    entry_points={"console_scripts": ["lambda-det = lambda_det.cli:main"]},
    # lambda-det export writes ONNX with these, and compares what it has written
    extras_require={"onnx": ["onnx>=1.16", "onnxruntime>=1.17", "onnxscript>=0.3"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
