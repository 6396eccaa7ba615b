"""Which commands of the hub a site carries out: those that a run needs, whatever the hub says of who asks.

FLARE checks local/authorization.json at a site only if the hub's message asks for it, and takes name and role of the
user from the message. Somebody who has the hub could therefore read files of a site by FLARE's shell commands, or have
it load code by a configuration of its logs. This component of a site's kit takes these commands away, in the process
that stays and in those of jobs, before either is connected.
"""

from __future__ import annotations

from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.admin_commands import (
    AbortCommand,
    AbortTaskCommand,
    AdminCommands,
    ByeCommand,
    CheckStatusCommand,
)
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.widgets.widget import Widget

ALLOWED = frozenset({
    TrainingTopic.CHECK_STATUS, TrainingTopic.GET_SCOPES, TrainingTopic.CHECK_RESOURCE, TrainingTopic.CANCEL_RESOURCE,
    TrainingTopic.DEPLOY, TrainingTopic.START_JOB, TrainingTopic.ABORT, TrainingTopic.ABORT_TASK,
    TrainingTopic.DELETE_RUN, TrainingTopic.NOTIFY_JOB_STATUS, SysCommandTopic.REPORT_VERSION,
})  # fmt: skip
IN_JOBS = (CheckStatusCommand, AbortCommand, AbortTaskCommand, ByeCommand)


class Refusal(RequestProcessor):  # type: ignore[misc]
    """Stands for a command that the site does not carry out."""

    def __init__(self, guard: Guard, topics: list[str]) -> None:
        self.guard, self.topics = guard, topics

    def get_topics(self) -> list[str]:
        return self.topics

    def process(self, request: Message, engine: object) -> Message:
        self.guard.logger.error(f"the hub asked for {request.topic!r}, which this site does for nobody: refused")
        return error_reply(f"this site does not carry out {request.topic!r}")


class Guard(Widget):  # type: ignore[misc]
    """Built with the rest of the kit's components, before FLARE hands the commands to whoever listens."""

    def __init__(self) -> None:
        super().__init__()
        known = ClientRequestProcessors.request_processors  # FLARE's own list, changed in place
        known[:] = [
            processor if set(processor.get_topics()) <= ALLOWED else Refusal(self, processor.get_topics())
            for processor in known
        ]
        AdminCommands.commands[:] = [command for command in AdminCommands.commands if isinstance(command, IN_JOBS)]
