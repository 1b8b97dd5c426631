"""When a certificate expires, read from its DER encoding (RFC 5280, section 4.1).

The command line has no library for certificates, and needs this one date. TBSCertificate is: version [0], serialNumber,
signature, issuer, validity, ...; validity is two times.
"""

from __future__ import annotations

import datetime
import ssl
from typing import Final

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17


def not_after(pem: str) -> float:
    """Return when the first certificate of a PEM expires, in seconds since 1970. Raises ValueError."""
    end = "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(pem.partition(end)[0].strip() + f"\n{end}\n")
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    tag, _, rest = _element(fields)
    skipped = 3 if tag == _VERSION else 2  # after the version: serialNumber, signature, issuer
    for _ in range(skipped):
        tag, validity, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError("the certificate has no validity")
    _, _, rest = _element(validity)
    tag, text, _ = _element(rest)
    pattern = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.datetime.strptime(text.decode(), pattern).replace(tzinfo=datetime.UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the first element's tag and content, and what follows it. Raises ValueError."""
    if len(data) < 2:
        raise ValueError("the certificate is cut off")
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        raise ValueError("the certificate is cut off")
    return data[0], data[start : start + length], data[start + length :]
