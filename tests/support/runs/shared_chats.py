"""Chats whose child processes serve all pools of a test process: each start takes seconds."""

from collections.abc import Mapping

from rollout.agents.chat_process import ChatProcess


class SharedChat(ChatProcess):
    """A chat that stays open when a pool is closed."""

    def close(self) -> None:
        pass


class SharedChats:
    """Stands for the class ChatProcess: returns one chat for equal files."""

    def __init__(self) -> None:
        self._chats: dict[frozenset[tuple[str, bytes]], SharedChat] = {}

    def __call__(self, files: Mapping[str, bytes]) -> SharedChat:
        content = frozenset(files.items())
        if content not in self._chats:
            self._chats[content] = SharedChat(files)
        return self._chats[content]

    def close(self) -> None:
        for chat in self._chats.values():
            ChatProcess.close(chat)
