"""One short file per family out of the shared layers; `registry` names them."""
