"""The errors kgen raises: one subclass per stage, all under `KgenError`.

A message says what was given, what was expected and what to do.
This module imports nothing.
"""


class KgenError(Exception):
    """Root of every error that kgen raises on purpose."""


class UsageError(KgenError):
    """A command line, setting or argument that can not be used; the CLI exits with 2."""


class ShapesError(UsageError):
    """A shapes file or shapes line that can not be read; names file, line and reason."""


class InvalidConfig(KgenError):
    """A configuration that is not valid for the problem or the device."""


class RenderError(KgenError):
    """A template that could not be instantiated."""


class CompilerMissing(KgenError):
    """No compiler back end was found; names what was searched."""


class CompileError(KgenError):
    """A compiler refused, timed out, spilled or serialised; carries its log."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class SassError(KgenError):
    """A cubin that the SASS pass could not read."""


class ArtifactError(KgenError):
    """The artifact store can not be written."""


class DatabaseError(KgenError):
    """The tuning database can not be used: unreadable, locked for too long, other schema."""


class BundleError(KgenError):
    """A bundle that is cut, altered, of another format or hostile, or a key that can not be used;
    nothing of it was taken."""


class DriverError(KgenError):
    """A CUDA driver call failed; `fatal` tells a dead context from an ordinary refusal."""

    def __init__(self, message: str, code: int = 0, fatal: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.fatal = fatal


class LaunchError(KgenError):
    """A kernel could not be loaded or launched."""


class WrongResult(KgenError):
    """A kernel's output differs from the reference; the candidate must never be timed."""


class MeasureError(KgenError):
    """A time that can not be true, or a measurement that could not be taken."""


class ImplausibleTime(MeasureError):
    """A time below what the problem's bytes need: the kernel did not do the work."""


class UnsupportedInput(KgenError, ValueError):
    """Tensors handed to the runtime that no path serves; says what was given and needed."""


class WorkerDied(KgenError):
    """A child process ended while it worked: a crash in native code, a signal, an exit."""


class WorkerTimeout(KgenError):
    """A child process was killed because its time was up."""


class GpuMissing(KgenError):
    """There is no GPU here that kgen can time kernels on; says what was looked for."""


class Untunable(KgenError):
    """A problem that can not be measured here, whatever the configuration: too big, for one."""


class Interrupted(KgenError):
    """The run was told to stop; everything finished so far is kept."""
