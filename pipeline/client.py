"""The former name of the package `batch_inference_pipeline`."""

import warnings

from batch_inference_pipeline import *  # noqa: F403

warnings.warn("pipeline.client is now called batch_inference_pipeline", DeprecationWarning, stacklevel=2)
