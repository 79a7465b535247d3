"""Builds sdist and wheel and tries them in a clean environment: `python -m tests.project.package`.

The wheel is built from the sdist, out of the files that git tracks, and both are left in `dist/`.
Twine checks their metadata, and the recipe for conda is rendered. Then Haiku, which requires a
distribution called `jmp`, is installed beside it in both orders: one distribution at a time is
called `jmp`, and the one that was installed last is imported. Where DeepMind's and this one are
installed over one another, that is noticed and repaired. For a release `--links` and `--images`
make the relative links of the README absolute and write the table of URLs.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from testbed import ROOT

DIST = ROOT / "dist"

# What is asked of the installed package, outside of the clone.
IS_OURS = """
import importlib.metadata, pathlib, sys
import jmp
assert jmp.__version__ == importlib.metadata.version("jmp"), importlib.metadata.version("jmp")
assert pathlib.Path(jmp.__file__).is_relative_to(sys.prefix), jmp.__file__
assert pathlib.Path(jmp.__file__).with_name("py.typed").exists()
"""
HAIKU_RUNS_ON_IT = """
import haiku as hk, jax, jax.numpy as jnp
assert hk.mixed_precision.__name__.startswith("haiku")
hk.mixed_precision.set_policy(hk.Linear, jmp.get_policy("p=f32,c=bf16,o=bf16"))
net = hk.transform(lambda x: hk.Linear(2)(x))
params = net.init(jax.random.key(0), jnp.ones((1, 3)))
assert net.apply(params, None, jnp.ones((1, 3))).dtype == jnp.bfloat16
assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
from jmp.adapters import haiku
"""
IS_DEEPMINDS = """
import jmp
assert not hasattr(jmp, "autocast"), jmp.__file__
"""
# What has to fail where the files of both lie in one folder, and words of the error.
MIXED_COMMAND = ("-m", "jmp"), "jmp 0.0.4 and jmp 1"
MIXED_IMPORT = ("-W", "error:Files of DeepMind", "-c", "import jmp"), "jmp lie among those of this"

# An unknown field, a specifier that cannot be read and an undefined variable are errors.
RECIPE_RENDERS = """
import pprint, sys
import rattler_build
(rendered,) = rattler_build.Stage0Recipe.from_file(sys.argv[1]).render()
package, requirements = (rendered.recipe.to_dict()[name] for name in ("package", "requirements"))
assert package == {"name": "jmp", "version": sys.argv[2]}, package
pprint.pprint(requirements)
"""


def absolute_links(text: str, links: str, images: str) -> str:
    """Returns Markdown whose relative links begin with `links`, those of images with `images`.

    Links to headings of the page itself and absolute ones stay.
    """

    def absolute(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        return f"{mark}[{words}]({(images if mark else links).rstrip('/')}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)


def copy_for_release(folder: pathlib.Path, links: str | None, images: str | None) -> None:
    """Copies the files that git tracks, with absolute links where their addresses are given."""
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():  # else it was deleted, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if links and images:
        readme = folder / "README.md"
        readme.write_text(absolute_links(readme.read_text(), links, images))
        urls = f'\n[project.urls]\nDocumentation = "{links}"\n'
        with (folder / "pyproject.toml").open("a") as file:
            file.write(urls)


class Environment:
    """A virtual environment of its own, in `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)

    def python(self, *arguments: str | pathlib.Path, quiet: bool = False) -> None:
        """Runs Python outside of the clone; raises CalledProcessError if it fails."""
        finished = self._run(arguments, quiet)
        if finished.returncode and quiet:
            print(finished.stdout)
        finished.check_returncode()

    def fails(self, arguments: Sequence[str], words: str) -> None:
        """Runs Python; raises AssertionError unless it fails with `words` in its output."""
        finished = self._run(arguments, quiet=True)
        assert finished.returncode and words in finished.stdout, finished.stdout

    def _run(
        self, arguments: Sequence[str | pathlib.Path], quiet: bool
    ) -> subprocess.CompletedProcess[str]:
        print("$ python", *(str(a).strip().splitlines()[0] for a in arguments), flush=True)
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
        command = [self._folder / "venv" / "bin" / "python", *arguments]
        # PYTHONPATH may name the clone, which is not what is tried here.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=self._folder, env=variables, text=True, **kept)

    def install(self, *what: str | pathlib.Path) -> None:
        self.python("-m", "pip", "install", "--quiet", *what)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", help="such as https://HOST/OWNER/jmp/blob/v1.0.0")
    parser.add_argument("--images", help="such as https://HOST/OWNER/jmp/raw/v1.0.0")
    arguments = parser.parse_args()
    if bool(arguments.links) != bool(arguments.images):
        parser.error("--links and --images belong together")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (source := folder / "source").mkdir()
        copy_for_release(source, arguments.links, arguments.images)
        environment = Environment(folder)
        environment.install("build", "setuptools>=77")
        shutil.rmtree(DIST, ignore_errors=True)
        environment.python("-m", "build", "--no-isolation", "--outdir", DIST, source, quiet=True)
        (wheel,) = DIST.glob("*.whl")
        tools = Environment(folder / "tools")
        tools.install("twine", "py-rattler-build")
        tools.python("-m", "twine", "check", "--strict", *DIST.iterdir())
        version = wheel.name.split("-")[1]
        tools.python("-c", RECIPE_RENDERS, ROOT / "conda" / "recipe.yaml", version)

        environment.install(wheel, "dm-haiku")
        environment.python("-c", IS_OURS + HAIKU_RUNS_ON_IT)
        environment.python("-m", "pip", "check")
        # Haiku asks for any jmp from 0.0.2 on: this one stays, a release candidate too.
        environment.install("--upgrade", "dm-haiku", "jmp")
        environment.python("-c", IS_OURS)
        # Asked for by its version, DeepMind's takes the place, and gives it back.
        environment.install("jmp==0.0.4")
        environment.python("-c", IS_DEEPMINDS)
        environment.install(wheel)
        environment.python("-c", IS_OURS + HAIKU_RUNS_ON_IT)
        environment.python("-m", "jmp")
        # Over one another: pip does so where it is told to, and so does a copy of files.
        over = ("--no-deps", "--ignore-installed")
        environment.install(*over, "jmp==0.0.4")
        environment.fails(*MIXED_COMMAND)
        environment.install(*over, wheel)
        environment.fails(*MIXED_COMMAND)
        environment.fails(*MIXED_IMPORT)
        for _ in range(2):  # once for each
            environment.python("-m", "pip", "uninstall", "--quiet", "--yes", "jmp")
        environment.install("--no-deps", wheel)
        environment.python(*MIXED_IMPORT[0])
        environment.python("-c", IS_OURS)
    print(f"Built and tried: {', '.join(path.name for path in sorted(DIST.iterdir()))}")


if __name__ == "__main__":
    main()
