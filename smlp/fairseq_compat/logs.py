"""Restore log lines that vanish, silence warnings that say nothing, and print errors of users without a traceback."""

from __future__ import annotations

import logging
import sys
import warnings
from types import TracebackType

from smlp.config.plugins import fault
from smlp.errors import ParallelError, UserError, one_line, out_of_memory

# (category, start of the message, module that warns). All of them concern how fairseq calls its libraries, none the
# user's input. Nothing is silenced by category alone.
_NOISE: list[tuple[type[Warning], str, str]] = [
    # fairseq uses hydra 1.3 through hydra 1.0's interface
    (UserWarning, r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", r"hydra\.experimental\."),
    (UserWarning, r"\s*The version_base parameter is not specified", r"hydra\.experimental\.initialize$"),
    (UserWarning, r"In 'config': Usage of deprecated keyword in package header", r"hydra\.core\.default_element$"),
    (UserWarning, r"\s*'config' is validated against ConfigStore schema", r""),  # in any module
    (UserWarning, r"\s*The strict flag in the compose API is deprecated", r"hydra\.compose$"),
    # deprecated names in fairseq and fairscale that torch still supports
    (FutureWarning, r"`torch\.cuda\.amp\.custom_(fwd|bwd)", r"fairscale\.experimental\.nn\.offload$"),
    (FutureWarning, r"`torch\.cuda\.amp\.autocast", r"fairseq\.tasks\.fairseq_task$"),
    (FutureWarning, r"`torch\.cuda\.amp\.GradScaler", r"fairseq\.optim\.amp_optimizer$"),
    (FutureWarning, r"`broadcast_buffers` is deprecated", r"smlp\.fairseq_compat\.processes$"),
    (UserWarning, r"Support for mismatched key_padding_mask and attn_mask", r"torch\.nn\.functional$"),
    # fairseq requests pinned memory and CUDA helpers even without a GPU
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator", r"torch\.utils\.data\.dataloader$"),
    # fairseq is recompiled at every start if bytecode cannot be written
    (SyntaxWarning, r'"is not" with ', r".*fairseq.tasks.multires_hubert_pretraining$"),
    # a block of one token; affects only the "past" target, which no language model here reads
    (RuntimeWarning, r"overflow encountered in scalar subtract", r"fairseq\.data\.token_block_dataset$"),
]


def apply() -> None:
    quiet_known_warnings()
    restore_log_output()
    say_once_that_logs_are_lost()
    install_error_hook()


def quiet_known_warnings() -> None:
    """Ignore the warnings of the table above, each by its message and module.

    If called before fairseq is imported, this covers the warnings of its import too.
    """
    for category, message, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    logging.getLogger("fairseq.dataclass.utils").addFilter(_lists_no_options)


def _lists_no_options(record: logging.LogRecord) -> bool:
    """Return False for fairseq's list of all options, 11,000 characters, which it logs before any error or Ctrl-C."""
    return not str(record.msg).startswith("Error when composing. Overrides")


def restore_log_output() -> None:
    """Give the root logger fairseq's own handler where an import took its place.

    ``fairseq.file_io`` calls ``logging.debug`` at import time when iopath is installed. That installs a bare handler
    (standard error, warnings only), after which ``logging.basicConfig`` in eval-lm, preprocess, generate and
    interactive does nothing, and their results are never shown. Only that bare handler is replaced.
    """
    from fairseq import utils

    root = logging.getLogger()
    if len(root.handlers) != 1:
        return
    (handler,) = root.handlers
    bare = (
        type(handler) is logging.StreamHandler
        and handler.stream is sys.stderr
        and (handler.formatter is None or handler.formatter._fmt == logging.BASIC_FORMAT)
        and root.level == logging.WARNING
    )
    if bare:
        utils.reset_logging()


def say_once_that_logs_are_lost() -> None:
    """Let training go on if the log cannot be written, with one warning instead of a traceback for each record."""
    said = []

    def handle(self: logging.Handler, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            return print_traceback(self, record)
        if not said:
            said.append(error)
            print(f"smlp: warning: log lines cannot be written and are lost: {error.strerror}", file=sys.stderr)

    print_traceback = logging.Handler.handleError
    logging.Handler.handleError = handle  # type: ignore[method-assign]


def install_error_hook() -> None:
    """Print a ``UserError``, a lack of memory or a lost rank as one line; other exceptions keep their traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (UserError, ParallelError)):
            print_user_error(error)
        elif (reason := out_of_memory(error) or fault(error)) is not None:
            print_user_error(reason)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def print_user_error(error: Exception | str) -> None:
    """Print ``smlp: error: ...`` on standard error, after flushing standard output."""
    sys.stdout.flush()
    print(f"smlp: error: {one_line(error)}", file=sys.stderr, flush=True)
