"""Certificate authority of the webhook, which the API server calls, and of the membership service."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING, Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY_S: Final = 86_400.0
AUTHORITY_VALID_S: Final = 3650 * DAY_S
SERVING_VALID_S: Final = 90 * DAY_S
AUTHORITY_RENEW_BEFORE_S: Final = 365 * DAY_S
RENEW_BEFORE_S: Final = 30 * DAY_S
CLOCK_SKEW_S: Final = 300.0  # a certificate that is a second old must also hold on a machine whose clock is behind


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates and keys of a server. `trusted`: the authority's certificate and the previous one, for clients.

    With both, no client is refused while some replicas still present a certificate of the old authority.
    """

    authority: KeyPair
    serving: KeyPair
    trusted: bytes


def maintained(material: Material | None, names: Sequence[str], now: float) -> Material:
    """Return the material, with the parts renewed that expire soon.

    A certificate for more names than these is good: while a new version is rolled out, replicas differ in what they
    need, and must not renew it in turns.
    """
    if material is None:
        authority = new_authority("gpuquota", now)
        return Material(authority=authority, serving=issue(authority, names, now), trusted=authority.certificate)
    if expires_at(material.authority.certificate) < now + AUTHORITY_RENEW_BEFORE_S:
        authority = new_authority("gpuquota", now)
        trusted = authority.certificate + material.authority.certificate
        return Material(authority=authority, serving=issue(authority, names, now), trusted=trusted)
    serving = material.serving.certificate
    if expires_at(serving) < now + RENEW_BEFORE_S:
        return msgspec.structs.replace(material, serving=issue(material.authority, names, now))
    current = names_of(serving)
    if not set(names) <= set(current):
        both = list(dict.fromkeys([*names, *current]))
        return msgspec.structs.replace(material, serving=issue(material.authority, both, now))
    return material


def check(material: Material) -> None:
    """Check the material. Raises ValueError if certificates and keys cannot be decoded or do not match."""
    for pair in (material.authority, material.serving):
        key = serialization.load_pem_private_key(pair.key, password=None)
        if x509.load_pem_x509_certificate(pair.certificate).public_key() != key.public_key():
            raise ValueError("a certificate is of another key")
    authority = x509.load_pem_x509_certificate(material.authority.certificate)
    try:
        x509.load_pem_x509_certificate(material.serving.certificate).verify_directly_issued_by(authority)
    except InvalidSignature:
        raise ValueError("the serving certificate is of another authority") from None


def new_authority(name: str, now: float, valid_s: float = AUTHORITY_VALID_S) -> KeyPair:
    """Return a self-signed certificate authority. `now` is in seconds since 1970."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key, now, valid_s).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return _pair(builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256()), key)


def issue(
    authority: KeyPair, names: Sequence[str], now: float, valid_s: float = SERVING_VALID_S, *, client: bool = False
) -> KeyPair:
    """Return a serving certificate for `names`: DNS names, IP addresses, URIs; the first is its common name.

    With `client` it is one to authenticate with: to Kubernetes the common name is the user's.
    """
    usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signing_key = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey), "authorities are made by new_authority"
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
    builder = (
        _builder(names[0], _common_name(issuer), key, now, valid_s)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    return _pair(builder.sign(signing_key, hashes.SHA256()), key)


def expires_at(certificate: bytes) -> float:
    """Return when the first certificate of a PEM expires, in seconds since 1970."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def names_of(certificate: bytes) -> tuple[str, ...]:
    """Return the DNS names and addresses of a serving certificate."""
    found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    dns = found.value.get_values_for_type(x509.DNSName)
    return (*dns, *(str(address) for address in found.value.get_values_for_type(x509.IPAddress)))


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, now: float, valid_s: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - CLOCK_SKEW_S))
        .not_valid_after(_time(now + valid_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    # a common name holds 64 characters at most; clients look at the alternative names only
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
