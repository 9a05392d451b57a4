"""The defaults of a batch's models: read from the registry once, then kept with the batch.

They are in the manifest and in the record. A control plane of a version without them drops those of
the manifest alone.
"""

from collections.abc import Iterable

from jobs.batch.manifest import save_manifest
from jobs.batch.model_defaults import read_defaults
from jobs.control.slices import Slice


def begin_defaults(held: Slice) -> None:
    """Set the defaults of all models for a validation.

    A repeated one has those that its early lines got.
    """
    manifest = held.manifest
    if manifest.defaults is not None:
        manifest.defaults = {**(held.fields.defaults or read_defaults(held.queue)), **manifest.defaults}


def keep_defaults(held: Slice, models: Iterable[str]) -> None:
    """Drop the defaults of other models than these from the manifest, after the validation."""
    defaults = held.manifest.defaults
    if defaults is not None:
        held.manifest.defaults = {name: defaults[name] for name in models if name in defaults}


def settle_defaults(held: Slice) -> None:
    """Add the defaults that were not known so far of models that the lines name.

    Raise like `save_manifest`.
    """
    manifest = held.manifest
    if manifest.defaults is None and held.fields.defaults:
        manifest.defaults = held.fields.defaults
    defaults = manifest.defaults
    if defaults is None or not (missing := [name for name in manifest.models if name not in defaults]):
        return
    known = read_defaults(held.queue)
    if found := {name: known[name] for name in missing if name in known}:
        manifest.defaults = defaults | found
        save_manifest(manifest)
        held.note({"defaults": manifest.defaults})
