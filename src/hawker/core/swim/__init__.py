"""Membership: who is in the group, who is doubtful, who is gone. It says whom to talk to, and never what to do."""

from hawker.core.swim.actions import Action, Changed, Conflict, Noted, PushPull, Send, StreamProbe
from hawker.core.swim.members import Known, Member, Status, View
from hawker.core.swim.settings import LAN, WAN, Settings, plain
from hawker.core.swim.swim import Swim
from hawker.core.swim.wire import NOTE_MAX, PAYLOAD_MAX

__all__ = [
    "LAN",
    "NOTE_MAX",
    "PAYLOAD_MAX",
    "WAN",
    "Action",
    "Changed",
    "Conflict",
    "Known",
    "Member",
    "Noted",
    "PushPull",
    "Send",
    "Settings",
    "Status",
    "StreamProbe",
    "Swim",
    "View",
    "plain",
]
