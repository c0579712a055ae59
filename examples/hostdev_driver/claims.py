"""Claims from files, for a driver without an API server."""

import json
from pathlib import Path
from typing import Final

import drahealth

FILE_BYTES: Final = 4 << 20


class ClaimFiles:
    """Claims in files ``<namespace>_<name>.json``, as ``kubectl get resourceclaim -o json`` writes them."""

    def __init__(self, directory: Path, driver: str) -> None:
        self._directory = directory
        self._driver = driver

    def __call__(self, ref: drahealth.ClaimRef) -> drahealth.Claim:
        """Return the claim in its file.

        Raises:
            TransientError: ``claim.not_found``, or as :func:`drahealth.parse_claim`.
            OSError: The file cannot be read.
        """
        path = self._directory / f"{ref.namespace}_{ref.name}.json"
        try:
            with open(path, "rb") as file:
                obj = json.loads(file.read(FILE_BYTES))
        except FileNotFoundError:
            raise drahealth.TransientError(f"{path} does not exist", code="claim.not_found") from None
        except (ValueError, RecursionError) as error:
            raise drahealth.TransientError(f"{path}: is not JSON: {error}", code="claim.malformed") from None
        if not isinstance(obj, dict):
            raise drahealth.TransientError(f"{path}: is not an object", code="claim.malformed")
        return drahealth.parse_claim(obj, self._driver, ref)
