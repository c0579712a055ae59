"""Reader of the ResourceClaims that the kubelet names in a prepare."""

from typing import Final

from agent.errors import ApiError
from agent.model.claim import Claim, ClaimRef
from agent.prepare.claim_parser import parse_claim
from agent.prepare.errors import TransientError
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer

CLAIMS: Final = "resourceclaims"


class ClaimReader:
    """Function that reads claims from the API server, for ``get_claim`` of a plugin server. Thread-safe.

    Blocks up to 10 s for the connect and for each read.
    """

    def __init__(self, api: ApiServer, driver: str) -> None:
        """Create a reader of claims, of which it returns the devices of one driver."""
        self._api = api
        self._driver = driver

    def __call__(self, ref: ClaimRef) -> Claim:
        """Read a claim from the API server, and return its present state.

        Raises:
            TransientError: ``claim.not_found``; or see :func:`drahealth.parse_claim`.
            BadConfigError: See :func:`drahealth.parse_claim`.
            ApiForbiddenError, ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
        """
        path = self._api.dra_path("namespaces", ref.namespace, CLAIMS, ref.name)
        try:
            obj = self._api.call("GET", path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._api.forget_dra_version()  # the version may be gone instead of the claim
            raise TransientError(f"the API server has no claim {ref}", code="claim.not_found") from None
        return parse_claim(obj, self._driver, ref)
