"""Bill of materials (SBOM) of a package or an image: CycloneDX JSON, on standard output.

Usage: ``python tools/sbom.py ROOT``. ROOT is a root filesystem: the Python packages are those of
``opt/drahealth``, the Debian packages those of ``var/lib/dpkg/status.d``, which only an image has.
"""

import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

PRODUCT = "drahealth"


def python_components(root: Path) -> Iterator[Component]:
    """Yield the Python packages of the agent's environment, with a licence that is an SPDX expression."""
    (packages,) = root.glob("opt/drahealth/lib/python3.*/site-packages")
    for found in distributions(path=[str(packages)]):
        name = found.metadata["Name"].lower().replace("_", "-")
        purl = PackageURL("pypi", name=name, version=found.version)
        expression = found.metadata.json.get("license_expression")
        yield Component(
            type=ComponentType.APPLICATION if name == PRODUCT else ComponentType.LIBRARY,
            name=name,
            version=found.version,
            purl=purl,
            bom_ref=str(purl),
            licenses=[LicenseExpression(str(expression))] if expression else [],
        )


def debian_components(root: Path) -> Iterator[Component]:
    """Yield the Debian packages of an image."""
    files = sorted((root / "var/lib/dpkg/status.d").glob("*"))
    release = (root / "etc/os-release").read_text() if files else ""
    distribution = dict(line.partition("=")[::2] for line in release.splitlines()).get("ID", "debian")
    for file in files:
        fields = HeaderParser().parsestr(file.read_text())
        if fields["Package"] == PRODUCT:  # a Python package, above
            continue
        name, version = fields["Package"], fields["Version"]
        purl = PackageURL("deb", distribution, name, version, {"arch": fields["Architecture"]})
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            purl=purl,
            bom_ref=str(purl),
        )


def bill_of_materials(root: Path) -> Bom:
    """Return the bill of materials of a root filesystem; equal for equal contents and SOURCE_DATE_EPOCH."""
    found = sorted([*python_components(root), *debian_components(root)], key=lambda item: str(item.purl))
    (product,) = (item for item in found if item.name == PRODUCT)
    parts = [item for item in found if item is not product]
    bom = Bom(components=parts)
    bom.metadata.component = product
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        bom.metadata.timestamp = datetime.fromtimestamp(int(epoch), UTC)
    bom.serial_number = uuid5(NAMESPACE_URL, "\n".join(str(item.purl) for item in found))
    bom.register_dependency(product, parts)
    return bom


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/sbom.py ROOT")
    print(JsonV1Dot6(bill_of_materials(Path(sys.argv[1]))).output_as_string(indent=2))
