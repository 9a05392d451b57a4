"""Where kernels run in tests: on a GPU where there is one, else under the interpreter."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
