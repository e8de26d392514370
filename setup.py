"""Builds the extension `cumem_sleep._core`, the simulated driver `libcuda_sim.so`, the hook that LD_PRELOAD names, and
the scanner of JSON bodies of `serve`.

Only headers of CUDA are needed: from CUDA_HOME or CUDA_PATH, else from the wheel `nvidia-cuda-runtime`, a build
requirement, else from /usr/local/cuda. Nothing is linked against CUDA. CUMEM_SLEEP_SANITIZE=address,undefined (any
list that the compiler's -fsanitize takes) builds all but the hook with sanitizers, and checks the states of segments.
"""

import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools._distutils.unixccompiler import UnixCCompiler
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
SIMULATED_DRIVER = "cumem_sleep.libcuda_sim"
# By this name those look for it who start processes with torch_memory_saver's LD_PRELOAD.
PRELOAD_HOOK = "cumem_sleep.integrations.torch_memory_saver.shim.torch_memory_saver_hook_mode_preload"
COMMIT = Path("cumem_sleep", "commit.txt")
PLAIN_LIBRARIES = {SIMULATED_DRIVER: ".so", PRELOAD_HOOK: ".abi3.so"}


def cuda_include() -> str:
    """The folder that holds cuda.h."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        include = Path(os.environ.get(variable) or "/nowhere") / "include"
        if (include / "cuda.h").exists():
            return str(include)
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuda.h":
                return str(Path(str(file.locate())).parent)
    if Path("/usr/local/cuda/include/cuda.h").exists():
        return "/usr/local/cuda/include"
    raise SystemExit(
        "cuda.h was not found: `pip install nvidia-cuda-runtime` (no GPU is needed) or set CUDA_HOME to a toolkit"
    )


def sources(folder: str) -> list[str]:
    """The C++ files of one folder, relative to the project."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.cpp"))


def require_compiler() -> None:
    """End with one line if there is no C++ compiler."""
    command = (shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "") or ["g++"])[0]
    if shutil.which(command) is None:
        raise SystemExit(
            f"the C++ compiler {command!r} was not found: install one that knows C++17 (apt install g++,"
            " dnf install gcc-c++), or name yours in CXX"
        )


def name_commit(copy: Path) -> None:
    """Write the commit of this checkout into a copy of it, if `git archive` has not."""
    is_named = not (ROOT / COMMIT).read_text().startswith("$")
    if is_named or not (ROOT / ".git").exists() or shutil.which("git") is None:
        return
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(git, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode == 0:
        (copy / COMMIT).unlink()  # a source distribution's is a link to the original
        (copy / COMMIT).write_text(found.stdout)


class BuildPy(build_py):
    """Copies the package, and names the commit there."""

    def run(self) -> None:
        """Copy; nothing is copied where the package stays in its place."""
        super().run()
        if not self.editable_mode:
            name_commit(Path(self.build_lib))


class SourceDistribution(sdist):
    """Packs the sources, and names the commit there."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the tree that is packed."""
        super().make_release_tree(base_dir, files)
        name_commit(Path(base_dir))


class Build(build):
    """Looks for the compiler before hundreds of lines about copied files hide that there is none."""

    def run(self) -> None:
        """Build a wheel's content."""
        require_compiler()
        super().run()


class KeptObjects:
    """Stands in for the compiler's `_compile`: takes an object of the same source, flags, compiler and headers.

    They are in `build/`, whichever kind of installation made them: of each source and flags the last one.
    """

    folder = ROOT / "build" / "objects"

    def __init__(self, compiler: UnixCCompiler) -> None:
        command = compiler.compiler_so_cxx
        version = subprocess.run([*command, "--version"], stdout=subprocess.PIPE, check=False).stdout
        self._compile, self._compiler = compiler._compile, (command, version)

    def __call__(
        self, obj: str, source: str, ext: str, cc_args: list[str], extra_postargs: list[str], pp_opts: list[str]
    ) -> None:
        """Make one object. Where headers are does not matter, nor whether warnings are errors."""
        flags = [each for each in (*cc_args, *extra_postargs) if not each.startswith("-I") and each != "-Werror"]
        made_with = hashlib.sha256(repr((self._compiler, flags)).encode()).hexdigest()[:16]
        content = hashlib.sha256(Path(source).read_bytes() + HEADERS).hexdigest()[:16]
        name = f"{source.replace(os.sep, '-')}-{made_with}-"
        kept = self.folder / f"{name}{content}.o"
        if not kept.exists():
            self._compile(obj, source, ext, cc_args, extra_postargs, pp_opts)
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(f"{name}*.o"):
                old.unlink(missing_ok=True)
            unfinished = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(obj, unfinished)
            unfinished.replace(kept)
        shutil.copyfile(kept, obj)


def linked(folder: str) -> str:
    """A link to a folder of headers, whose path is the same in every build, as ccache wants it."""
    link = ROOT / "build" / "include" / hashlib.sha256("".join(sorted(os.listdir(folder))).encode()).hexdigest()[:8]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return str(link.relative_to(ROOT))


class BuildExt(build_ext):
    """Gives plain shared objects, which are no Python modules, their file names."""

    def finalize_options(self) -> None:
        """Link always: what takes long is kept."""
        super().finalize_options()
        self.force = True

    def run(self) -> None:
        """Build the extensions; an editable installation runs this without `build`."""
        require_compiler()
        super().run()

    def build_extensions(self) -> None:
        """Compile what is not kept, through ccache where it is."""
        kept = KeptObjects(self.compiler)  # which asks the compiler itself for its version
        command = self.compiler.compiler_so_cxx
        if shutil.which("ccache") and "ccache" not in command[0]:
            self.compiler.compiler_so_cxx = ["ccache", *command]
        self.compiler._compile = kept
        for extension in self.extensions:  # pip's environments, where headers are, have a new name each time
            extension.include_dirs = [linked(folder) for folder in extension.include_dirs]
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """Where the extension `fullname` is put, relative to the root of packages."""
        for name, suffix in PLAIN_LIBRARIES.items():
            if fullname.endswith(name.rpartition(".")[2]):
                return f"{fullname.replace('.', os.sep)}{suffix}"
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No module initialisation function to export."""
        return ext.export_symbols


include = cuda_include()
sanitize = os.environ.get("CUMEM_SLEEP_SANITIZE", "")
compile_args = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
if os.environ.get("CUMEM_SLEEP_WERROR") == "1":
    compile_args.append("-Werror")
link_args = ["-pthread"]
# Python's own flags ask for debug information: nine tenths of a wheel
plain_compile_args, plain_link_args = [*compile_args, "-g0"], [*link_args, "-Wl,--strip-all"]
if not sanitize:
    compile_args, link_args = plain_compile_args, plain_link_args
else:
    # Of debug information what reports show, lines: more takes the compiler a fifth longer. With -O2 it takes half as
    # long again.
    flags = ["-O1", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g1"]
    compile_args += [*flags, "-DCUMEM_DEBUG"]  # which checks invariants too
    link_args += flags
# Thread-local data lies beside each thread's stack then, where there is little room. Otherwise a thread's first use of
# it allocates, and the C library ends the process if there is no memory.
static_tls = "-ftls-model=initial-exec"
headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
# What objects depend on beside their sources and flags.
HEADERS = repr(
    (
        (pybind11.__version__, sys.version),
        [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (*headers, Path(include, "cuda.h"))],
    )
).encode()

ParallelCompile().install()  # a core for each file
setup(
    ext_modules=[
        Extension(
            "cumem_sleep._core",
            sources("csrc"),
            include_dirs=[include, pybind11.get_include()],
            depends=headers,
            extra_compile_args=[*compile_args, static_tls],
            extra_link_args=link_args,
            language="c++",
        ),
        Extension(
            SIMULATED_DRIVER,
            sources("csrc/sim"),
            include_dirs=[include],
            depends=[*headers, "csrc/sim/exports.map"],
            extra_compile_args=[*compile_args, "-Wpedantic"],
            extra_link_args=[
                *link_args,
                "-Wl,-soname,libcuda_sim.so",
                "-Wl,--version-script=csrc/sim/exports.map",
                "-ldl",
            ],
            language="c++",
        ),
        Extension(
            "cumem_sleep.serve._json_scan",
            sources("csrc/serve"),
            include_dirs=[pybind11.get_include()],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            language="c++",
        ),
        Extension(
            PRELOAD_HOOK,
            sources("csrc/preload"),
            # Never with sanitizers: it is loaded into programs that have no runtime of theirs.
            extra_compile_args=[*plain_compile_args, "-Wpedantic"],
            extra_link_args=[*plain_link_args, "-Wl,--as-needed", "-ldl"],
            language="c++",
        ),
    ],
    cmdclass={"build": Build, "build_py": BuildPy, "build_ext": BuildExt, "sdist": SourceDistribution},
)
