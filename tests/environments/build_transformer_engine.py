"""Compile transformer-engine-torch into this Python's environment, without GPU or CUDA toolkit.

Run the script with the environment's own python, after installing transformer-engine.txt. The
script needs g++ and takes minutes (MAX_JOBS compilers at a time, one by default). A finished wheel
is kept in the directory given as the only argument. If the right version is installed already, the
script does nothing. Without a GPU the imports and FusedAdam's legality checks work afterwards. A
legal FusedAdam(...) goes on to allocate one integer with device="cuda".
"""

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(wheels: Path) -> None:
    version = metadata.version("transformer-engine-cu13")
    if installed("transformer-engine-torch") == version:
        return
    nvidia = Path(sysconfig.get_path("purelib"), "nvidia")
    include = sorted(str(path) for path in nvidia.glob("*/include"))
    toolkit = nvidia / "cu13"
    if not (toolkit / "bin" / "nvcc").is_file():
        sys.exit(f"no nvcc in {toolkit}: install transformer-engine.txt first")
    environment = dict(
        os.environ,
        CUDA_HOME=str(toolkit),
        CPLUS_INCLUDE_PATH=os.pathsep.join(
            filter(None, [*include, os.environ.get("CPLUS_INCLUDE_PATH")])
        ),
        MAX_JOBS=os.environ.get("MAX_JOBS", "1"),
        NVTE_FRAMEWORK="pytorch",
        NVTE_PYTORCH_FORCE_BUILD="TRUE",  # otherwise setup.py looks for a finished wheel on GitHub
        PATH=os.pathsep.join(
            [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        ),  # ninja
    )
    # The binary fits only one version of torch, which neither its file name nor pip's cache states.
    wheels = wheels / f"torch-{metadata.version('torch')}"
    pip = [sys.executable, "-m", "pip"]
    what = f"transformer-engine-torch=={version}"
    if not any(
        wheels.glob(
            f"transformer_engine_torch-{version}-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl"
        )
    ):
        build = [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--wheel-dir",
            str(wheels),
        ]
        subprocess.run(
            [*build, "--no-binary", what.split("==", maxsplit=1)[0], what],
            env=environment,
            check=True,
        )
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--find-links", str(wheels), what], check=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
