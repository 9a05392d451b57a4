"""Workers placed as Ray actors (`pipeline fleet`), and a stage for Ray Data (`docs/ray.md`)."""

from pipeline.ray.predictor import Predictor

__all__ = ["Predictor"]
