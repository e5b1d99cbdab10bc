"""TLS contexts from the run's trust material: 1.3 only, and no authority but the run's.

For HTTP the server asks for a client certificate and takes none as an answer: each route decides
whether it needs one. The client insists on the fixed name `SERVER_NAME`, because every peer has a
certificate of the same authority and must not be able to pass for the coordinator. On relay links
both sides must show one, and whose it is must fit the hello.
"""

from __future__ import annotations

import ssl
import tempfile

from echo2p2p.errors import ConfigError
from echo2p2p.net.ports import TlsClient, TlsServer


def server_context(tls: TlsServer) -> ssl.SSLContext:
    """Return the coordinator's context; client certificates are verified if shown.

    Raises:
        ConfigError: The PEM texts are damaged or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL
    # Nobody resumes sessions here; tickets would cost two signatures' worth of CPU a connection.
    context.num_tickets = 0
    _trust(context, tls.authority)
    _show(context, tls.certificate, tls.private_key)
    return context


def client_context(tls: TlsClient) -> ssl.SSLContext:
    """Return a client's context, to be used with ``server_hostname=SERVER_NAME``.

    Raises:
        ConfigError: The PEM texts are damaged or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    if tls.authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        _trust(context, tls.authority)
    if tls.certificate is not None and tls.private_key is not None:
        _show(context, tls.certificate, tls.private_key)
    return context


def link_contexts(tls: TlsServer) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a relay link's two ends: for who dials, and for who is dialled.

    Either takes a certificate of the run only, but anybody's: the caller compares its owner.

    Raises:
        ConfigError: The PEM texts are damaged or do not belong together.
    """
    dialling = client_context(TlsClient(tls.authority, tls.certificate, tls.private_key))
    dialling.check_hostname = False
    dialled = server_context(tls)
    dialled.verify_mode = ssl.CERT_REQUIRED
    return dialling, dialled


def _trust(context: ssl.SSLContext, authority: bytes) -> None:
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls.authority", "not a certificate in PEM: join again") from error


def _show(context: ssl.SSLContext, certificate: bytes, private_key: bytes) -> None:
    # The ssl module loads keys from files only. This one is readable by its owner alone, and gone
    # at the end of the block.
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + private_key)
        file.flush()
        try:
            context.load_cert_chain(file.name)
        except (ssl.SSLError, ValueError) as error:
            detail = "certificate and private key are damaged or do not belong together"
            raise ConfigError("tls.certificate", f"{detail}: join again") from error
