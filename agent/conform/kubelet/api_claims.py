"""ResourceSlices and claims of a conformance test at the API server.
All functions block up to 10 s for the connect and for each read."""

from typing import Any, Final

from agent.conform.outcomes import shorten
from agent.errors import ApiError, ApiUnreachableError
from agent.model.json_values import JsonObject, get_mapping, get_text
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer

SLICES: Final = "resourceslices"
CLAIMS: Final = "resourceclaims"


def read_slices_and_claims(api: ApiServer) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return all ResourceSlices, and all ResourceClaims of all namespaces.

    Raises:
        ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
    """
    return (
        list(api.list_objects(api.dra_path(SLICES)).items),
        list(api.list_objects(api.dra_path(CLAIMS)).items),
    )


def create_claim(api: ApiServer, claim: JsonObject) -> JsonObject:
    """Create a claim and write its allocation, as the scheduler does; return the created one.

    Raises:
        ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`. No claim remains then.
    """
    metadata = get_mapping(claim, "metadata")
    namespace, name = (get_text(metadata, key, "metadata") for key in ("namespace", "name"))
    version = f"resource.k8s.io/{api.dra_version()}"
    requests = get_mapping(get_mapping(claim, "spec"), "devices")["requests"]
    body: dict[str, Any] = {
        "apiVersion": version,
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"devices": {"requests": _in_version(requests, api.dra_version())}},
    }
    path = api.dra_path("namespaces", namespace, CLAIMS)
    created = api.call("POST", path, body)
    try:
        return api.call("PUT", f"{path}/{name}/status", created | {"status": claim["status"]})
    except BaseException:
        delete_claim(api, claim)
        raise


def _in_version(requests: object, version: str) -> object:
    """Return the requests of a ResourceClaim in the format of an API version: v1beta1 has no ``exactly``."""
    if version != "v1beta1" or not isinstance(requests, list):
        return requests
    found = []
    for request in requests:
        fields = dict(get_mapping({"request": request}, "request"))
        exactly = get_mapping(fields, "exactly", "request")
        fields.pop("exactly", None)
        found.append({**fields, **exactly})
    return found


def delete_claim(api: ApiServer, claim: JsonObject) -> str:
    """Delete a claim that :func:`create_claim` created; return why it may still exist, or nothing."""
    metadata = get_mapping(claim, "metadata")
    namespace, name = (get_text(metadata, key, "metadata") for key in ("namespace", "name"))
    try:
        api.call("DELETE", api.dra_path("namespaces", namespace, CLAIMS, name))
    except (ApiError, ApiUnreachableError, OSError) as error:
        if isinstance(error, ApiError) and error.status == NOT_FOUND:
            return ""
        return f"claim {namespace}/{name} was not deleted: {shorten(str(error))}"
    return ""
