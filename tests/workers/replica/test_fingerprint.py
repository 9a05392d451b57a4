"""What tells workers apart whose answers may differ."""

from typing import Any

import msgspec
import pytest

from tests.workers.replica.test_statistics import READY
from workers.replica.fingerprint import system_fingerprint


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"max_num_seqs": 2, "max_model_len": 64, "num_blocks": 7}, True),
        ({"device": "cpu:1"}, True),
        ({"device": "cuda:0"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"cache_dtype": "bfloat16"}, False),
        ({"quantization": "int8"}, False),
        ({"backend": "torch"}, False),
        ({"model_digest": "other"}, False),
    ],
)
def test_it_changes_with_what_answers_follow_from(changed: dict[str, Any], same: bool) -> None:
    own = system_fingerprint(READY)
    assert (system_fingerprint(msgspec.structs.replace(READY, **changed)) == own) is same
    assert own.startswith("fp_")
    assert len(own) == 15
