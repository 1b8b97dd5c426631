"""The images of a release: the same bytes each time, nothing of the machine inside, containers without privileges."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.dsl.spec.pod_template import PROGRAM
from kfp_gpuquota.version import __version__
from tests.effort import SOAK
from tests.kubernetes.conftest import skip_or_fail
from tests.polling import until
from tools.devcluster.image import ARCHITECTURES
from tools.release import debian, distributions, images, oci, sbom, wheels
from tools.release.__main__ import main
from tools.release.layer import Blob, Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Run = Callable[..., str]

EPOCH = 1_790_000_000
REGISTRY = "registry.example/q"
CONTAINERD = """\
version = 2
root = "{root}/root"
state = "{root}/state"
[grpc]
  address = "{root}/socket"
[ttrpc]
  address = "{root}/socket.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""
LEFTOVER = re.compile(r"etc/apt/|var/log/.|var/cache/.|.*(\.pyc|/direct_url\.json)$")
STARTED = """
import bz2, ctypes, lzma, os, sqlite3, ssl, uuid, zlib, zoneinfo
import aiohttp, cryptography.x509, msgspec, numpy, yaml
import kfp_gpuquota.cluster.kubernetes.__main__, kfp_gpuquota.cluster.kubernetes.sharing.node_agent, elastic_runtime
assert ssl.create_default_context().get_ca_certs(), "no certificate authorities"
assert zoneinfo.ZoneInfo("Europe/Berlin")
numpy.linalg.inv(numpy.eye(3))
try:
    open("/written", "w")
except OSError as error:
    print(os.getuid(), os.getgid(), os.uname().machine, error.strerror)
"""


@dataclass(frozen=True)
class Archive:
    """An archive that was read."""

    blobs: Mapping[str, bytes]
    index: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Archive:
        with tarfile.open(path) as archive:
            files = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
        assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
        blobs = {name.rpartition("/")[2]: content for name, content in files.items() if name.startswith("blobs/")}
        for digest, content in blobs.items():
            assert hashlib.sha256(content).hexdigest() == digest
        return cls(blobs, json.loads(files["index.json"]))

    def blob(self, descriptor: Mapping[str, Any]) -> bytes:
        content = self.blobs[descriptor["digest"].removeprefix("sha256:")]
        assert len(content) == descriptor["size"]
        return content

    def manifests(self) -> dict[str, dict[str, Any]]:
        """The manifest of each architecture."""
        (top,) = self.index["manifests"]
        listed = json.loads(self.blob(top))["manifests"]
        return {one["platform"]["architecture"]: json.loads(self.blob(one)) for one in listed}

    def config(self, architecture: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.blob(self.manifests()[architecture]["config"]))
        assert config["architecture"] == architecture
        return config

    def layers(self, architecture: str) -> list[bytes]:
        """Uncompressed, with the digests that the configuration names."""
        layers = [gzip.decompress(self.blob(one)) for one in self.manifests()[architecture]["layers"]]
        found = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        assert found == self.config(architecture)["rootfs"]["diff_ids"]
        return layers

    def unpack(self, architecture: str, root: Path) -> None:
        for layer in self.layers(architecture):
            with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
                archive.extractall(root)


@dataclass(frozen=True)
class Release:
    """Images for both architectures, built from mirrors with an address of their own."""

    folder: Path
    built: list[images.Built]
    sources: list[str]
    mirror: str

    def archive(self, name: str) -> Archive:
        return Archive.read(self.folder / images.archive_name(name))


def small_layer(order: int = 1) -> Layer:
    layer = Layer()
    for path in ("./bin/tool", "etc/name")[::order]:
        layer.add(path, path, 0o755)
    layer.link("lib64/linker", "/lib/linker")
    layer.merge_usr()
    return layer


def small_image(path: Path, layers: Mapping[str, list[Blob]]) -> Archive:
    settings = oci.Settings(user="65532:65532", entrypoint=("/bin/tool",), environment={"A": "1"}, ports=("8080",))
    oci.write(path, "registry.example:5000/q/tool:v1", settings, layers, EPOCH)
    return Archive.read(path)


def test_a_layer_does_not_depend_on_the_order_in_which_its_files_were_added() -> None:
    one, other = small_layer().pack(EPOCH), small_layer(-1).pack(EPOCH)
    assert one == other
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one.content))) as archive:
        entries = {entry.name: entry for entry in archive}
    assert list(entries) == ["bin", "etc", "etc/name", "lib", "lib64", "sbin", "usr", "usr/bin", "usr/bin/tool",
                             "usr/lib64", "usr/lib64/linker"]  # fmt: skip
    assert entries["bin"].linkname == "usr/bin"
    assert entries["usr/bin/tool"].mode == 0o755
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {(0, 0, EPOCH)}


def test_an_archive_has_one_index_with_a_manifest_for_each_architecture(tmp_path: Path) -> None:
    layers = {one: [small_layer().pack(EPOCH)] for one in ("arm64", "amd64")}
    archive = small_image(tmp_path / "a.tar", layers)
    assert list(archive.manifests()) == ["amd64", "arm64"]
    assert archive.index["manifests"][0]["annotations"] == {
        "io.containerd.image.name": "registry.example:5000/q/tool:v1",
        "org.opencontainers.image.ref.name": "v1",
    }
    config = archive.config("arm64")["config"]
    assert (config["User"], config["Entrypoint"], config["Env"]) == ("65532:65532", ["/bin/tool"], ["A=1"])
    assert config["ExposedPorts"] == {"8080/tcp": {}}
    small_image(tmp_path / "b.tar", dict(reversed(layers.items())))
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("kfp-gpuquota/controller:v1", "docker.io/kfp-gpuquota/controller:v1"),
        ("controller:v1", "docker.io/library/controller:v1"),
        ("localhost/controller:v1", "localhost/controller:v1"),
        ("registry:5000/controller:v1", "registry:5000/controller:v1"),
        ("registry.example/q/controller:v1", "registry.example/q/controller:v1"),
    ],
)
def test_a_kubelet_finds_an_imported_image_under_its_full_name(name: str, full: str) -> None:
    assert oci.full_name(name) == full


def test_a_wheel_is_unpacked_with_its_programs(tmp_path: Path) -> None:
    path = tmp_path / "Some_Tool-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("some_tool/__init__.py", "")
        wheel.writestr("Some_Tool-1.2.dist-info/entry_points.txt", "[console_scripts]\nTool = some_tool:main [x]\n")
        wheel.writestr("Some_Tool-1.2.data/scripts/old", "#!python\nprint()\n")
        wheel.writestr("Some_Tool-1.2.data/data/share/text", "text")
        executable = zipfile.ZipInfo("some_tool/helper")
        executable.external_attr = 0o100755 << 16
        wheel.writestr(executable, "x")
    layer = Layer()
    environment = wheels.Environment("opt/env")
    environment.create(layer)
    assert environment.install([path], layer) == [debian.Package("pypi", "some-tool", "1.2")]
    files = layer.files
    assert files["opt/env/bin/Tool"].content.startswith(
        b"#!/opt/env/bin/python\nimport sys\nfrom some_tool import main"
    )
    assert files["opt/env/bin/old"].content == b"#!/opt/env/bin/python\nprint()\n"
    assert files["opt/env/share/text"].content == b"text"
    assert files["opt/env/lib/python3.11/site-packages/some_tool/helper"].mode == 0o755
    assert files["opt/env/bin/python"].target == "/usr/bin/python3.11"


def test_a_wheel_with_files_for_another_location_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tool-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tool-1.data/headers/tool.h", "")
    with pytest.raises(distributions.BuildError, match="scheme 'headers'"):
        wheels.Environment("opt/env").install([path], Layer())


def test_a_package_is_extracted_without_what_belongs_to_a_machine(tmp_path: Path) -> None:
    if not shutil.which("dpkg-deb"):
        skip_or_fail("dpkg-deb is absent")
    tree, found = tmp_path / "tree", tmp_path / "found"
    found.mkdir()
    for name in ("DEBIAN/control", "lib/tool/data", "etc/apt/sources.list", "usr/share/doc/tool/copyright",
                 "usr/share/doc/tool/README", "usr/share/ca-certificates/one.crt"):  # fmt: skip
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"{name}\n")
    (tree / "lib/tool/hard").hardlink_to(tree / "lib/tool/data")
    (tree / "usr/share/doc/tool-data").symlink_to("tool")
    control = "Package: tool\nVersion: 1:2~3\nArchitecture: all\nMaintainer: M <m@example.org>\nDescription: d\n more\n"
    (tree / "DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", tree, found / "tool_2~3_all.deb"], check=True, capture_output=True)
    layer, packages = debian.Downloaded(found).layer(["tool"])
    debian.complete_system(layer)
    assert packages == [debian.Package("deb", "tool", "1:2~3", "all")]
    assert {"usr/lib/tool/data", "usr/lib/tool/hard", "usr/share/doc/tool/copyright", "usr/share/doc/tool-data"} <= (
        layer.files.keys()
    )
    assert not layer.files.keys() & {"etc/apt/sources.list", "usr/share/doc/tool/README", "lib/tool/data"}
    assert layer.files["usr/lib/tool/hard"].target == "usr/lib/tool/data"
    assert layer.files["var/lib/dpkg/status.d/tool"].content.decode() == control
    assert layer.files["etc/ssl/certs/ca-certificates.crt"].content == b"usr/share/ca-certificates/one.crt\n"
    assert layer.files["etc/passwd"].content.startswith(b"root:x:0:0:")
    with pytest.raises(distributions.BuildError, match="no package other"):
        debian.Downloaded(found).layer(["other"])


def test_a_machine_without_mmdebstrap_is_named_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH))
    with pytest.raises(distributions.BuildError, match="apt-get install dpkg mmdebstrap"):
        images.build(tmp_path, REGISTRY, "v1", EPOCH)
    assert main([str(tmp_path / "release"), "--images"]) == 1
    assert not (tmp_path / "release").exists()
    assert debian.host_sources() == []


def test_the_sbom_lists_what_is_in_an_image(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"image")
    inside = {
        debian.Package("deb", "libstdc++6", "1:2+b1", "arm64"),
        debian.Package("pypi", "kfp-gpuquota", __version__),
        debian.Package("pypi", "yarl", "1.2"),
    }
    path, _ = sbom.write(tmp_path, [archive], EPOCH, [images.Built(archive, frozenset(inside))])
    document = json.loads(path.read_text())
    contained = {
        one["relatedSpdxElement"] for one in document["relationships"] if one["relationshipType"] == "CONTAINS"
    }
    packages = {one["SPDXID"]: one for one in document["packages"]}
    assert len(packages) == len(document["packages"])
    locators = {packages[one]["externalRefs"][0]["referenceLocator"] for one in contained}
    assert locators == {
        "pkg:deb/debian/libstdc%2B%2B6@1%3A2%2Bb1?arch=arm64&distro=bookworm",
        f"pkg:pypi/kfp-gpuquota@{__version__}",
        "pkg:pypi/yarl@1.2",
    }


class Redirect(http.server.BaseHTTPRequestHandler):
    """Sends a client on to the real mirror: only the address that the client uses is this one's."""

    targets: Mapping[str, str] = {}

    def do_GET(self) -> None:
        _, name, rest = self.path.split("/", 2)
        self.send_response(302)
        self.send_header("Location", f"{self.targets[name].rstrip('/')}/{rest}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def redirecting(targets: Mapping[str, str]) -> Iterator[str]:
    """The address of a server whose folders are other servers."""
    handler = type("Handler", (Redirect,), {"targets": targets, "protocol_version": "HTTP/1.1"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def index_address() -> str:
    """Where this machine's pip finds packages; "" for pip's default."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return os.environ.get("PIP_INDEX_URL") or done.stdout.strip()


HOST = ARCHITECTURES[os.uname().machine]
BUILT = list(images.ARCHITECTURES) if SOAK else [HOST]
"""The architectures that are built: the other one takes minutes, half of them in an emulator."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    if lack := debian.missing():
        skip_or_fail(lack)
    folder = tmp_path_factory.mktemp("release")
    distributions.build(folder, EPOCH)
    suites = [line.split()[-3:-1] for line in debian.host_sources()]
    if not suites:
        skip_or_fail(f"apt has no source of {debian.RELEASE} on this machine")
    targets = {**{suite: address for address, suite in suites}, "simple": index_address()}
    with redirecting(targets) as mirror, pytest.MonkeyPatch.context() as patched:
        if targets["simple"]:
            patched.setenv("PIP_INDEX_URL", f"http://{mirror}/simple/")
        sources = [debian.source(f"http://{mirror}/{suite}", suite) for _, suite in suites]
        yield Release(folder, images.build(folder, REGISTRY, "v1", EPOCH, BUILT, sources), sources, mirror)


@pytest.mark.slow
@pytest.mark.xdist_group("release-images")
class TestBuiltImages:
    """Built once from packages that are downloaded."""

    @pytest.mark.skipif(not SOAK, reason="builds all images once more; make soak does")
    def test_the_same_packages_give_the_same_bytes(self, built: Release, tmp_path: Path) -> None:
        for wheel in built.folder.glob("*.whl"):
            shutil.copy(wheel, tmp_path)
        images.build(tmp_path, REGISTRY, "v1", EPOCH, BUILT[:1], built.sources)
        for name in images.NAMES:
            again = Archive.read(tmp_path / images.archive_name(name)).manifests()[BUILT[0]]
            assert again == built.archive(name).manifests()[BUILT[0]], name

    def test_no_mirror_no_path_and_no_log_of_this_machine_is_inside(self, built: Release) -> None:
        absent = [built.mirror, str(built.folder), sys.prefix, str(distributions.REPOSITORY)]
        for name in images.NAMES:
            archive = built.archive(name)
            layers = [layer for one in BUILT for layer in archive.layers(one)]
            for content in [*layers, json.dumps([archive.config(one) for one in BUILT]).encode()]:
                assert not [one for one in absent if one.encode() in content], name
            for layer in layers:
                with tarfile.open(fileobj=io.BytesIO(layer)) as files:
                    names = files.getnames()
                assert not [one for one in names if LEFTOVER.match(one)]

    def test_each_image_has_the_user_and_the_entrypoint_of_its_dockerfile(self, built: Release) -> None:
        for name in images.NAMES:
            text = (distributions.REPOSITORY / "images" / name / "Dockerfile").read_text()
            for architecture in BUILT:
                config = built.archive(name).config(architecture)["config"]
                assert config["User"] == re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1]
                assert config["Entrypoint"] == json.loads(re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[-1])
                assert config["Labels"]["org.opencontainers.image.version"] == __version__

    def test_the_packages_of_the_architectures_are_listed(self, built: Release) -> None:
        for image in built.built:
            architectures = {one.architecture for one in image.packages if one.kind == "deb"}
            assert {*BUILT} <= architectures <= {*BUILT, "all"}
        assert {"kfp-gpuquota", "elastic-runtime", "numpy"} <= {one.name for one in built.built[0].packages}
        assert "golang" in {one.kind for one in built.built[1].packages}

    def test_containers_run_without_privileges_on_a_read_only_root(self, built: Release, tmp_path: Path) -> None:
        with containerd(tmp_path / "containerd") as run:
            for name in images.NAMES:
                run("images", "import", str(built.folder / images.archive_name(name)))
            start = ("run", "--rm", "--read-only", "--net-host")
            entrypoint = built.archive("controller").config(HOST)["config"]["Entrypoint"]
            usage = run(*start, f"{REGISTRY}/controller:v1", "usage", *entrypoint, "--help")
            assert usage.startswith("usage: gpuquota-controller")
            python = ("/opt/gpuquota/bin/python", "-c", STARTED)
            started = run(*start, f"{REGISTRY}/controller:v1", "started", *python)
            assert started.split(maxsplit=3)[::3] == ["65532", "Read-only file system"]
            script = f"python3 -c 'import kubernetes, kfp_gpuquota.dsl.launcher' && {PROGRAM} install /dev/shm"
            copied = run(*start, f"{REGISTRY}/launcher:v1", "copied", "sh", "-c", f"{script} && ls /dev/shm; id -u")
            assert copied.split() == ["gpuquota-worker", "runtime", "65532"]
            held = run(
                *start, f"{REGISTRY}/reservation:v1", "held", "sh", "-c", "id -u; touch /written || echo refused"
            )
            assert held.split() == ["65532", "refused"]

    @pytest.mark.parametrize("architecture", BUILT)
    def test_the_controller_starts_on_its_architecture(self, built: Release, architecture: str, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            skip_or_fail("chroot needs root")
        built.archive("controller").unpack(architecture, tmp_path)
        emulator: list[str] = []
        if architecture != HOST:
            emulator = [f"/{self.emulator(architecture, tmp_path)}"]
        command = ["chroot", "--userspec=65532:65532", str(tmp_path), *emulator, "/opt/gpuquota/bin/python"]
        done = subprocess.run([*command, "-c", STARTED], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[2] == wheels.MACHINES[architecture]

    def emulator(self, architecture: str, root: Path) -> str:
        """Copy the emulator of an architecture into a root file system; its name there."""
        name = f"qemu-{wheels.MACHINES[architecture]}-static"
        found = shutil.which(name)
        if not found:
            skip_or_fail(f"{name} is absent")
        shutil.copy(found, root / name)
        return name


@contextmanager
def containerd(folder: Path) -> Iterator[Run]:
    """A containerd of its own; yields a function that runs `ctr` and returns its output."""
    if os.geteuid() != 0 or not shutil.which("containerd") or not shutil.which("runc"):
        skip_or_fail("containers need root, containerd and runc")
    folder.mkdir()
    (folder / "config.toml").write_text(CONTAINERD.format(root=folder))
    base = ["ctr", f"--address={folder}/socket"]

    def run(*arguments: str) -> str:
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["containerd", f"--config={folder}/config.toml"], stdout=log, stderr=log)
        try:
            until(lambda: subprocess.run([*base, "version"], capture_output=True, check=False).returncode == 0)
            yield run
        finally:
            process.terminate()
            process.wait()
