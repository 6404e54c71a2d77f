"""Environments for tests, as a user would write them."""

import asyncio
import os
import random
import time


class Guess:
    """Guess the number of the task. The environment counts the guesses."""

    async def start(self, task):
        self.secret, self.guesses = task["secret"], 0

    async def step(self, action):
        self.guesses += 1
        if action.answer.strip() == str(self.secret):
            return 1.0 / self.guesses, {"guesses": self.guesses}
        return f"guess {self.guesses} of {os.getpid() if action.text == 'pid' else 'many'} is wrong", {"tool_calls": 1.0}


class Dice(Guess):
    """Its state cannot be rebuilt by repeating the turns."""

    deterministic = False


class Liar:
    """Says that it is deterministic, and is not."""

    async def start(self, task):
        self.word = str(random.random())

    async def step(self, action):
        return self.word


class Faults:
    """Does what the turn says."""

    async def start(self, task):
        self.kept = []

    async def step(self, action):
        match action.text:
            case "hang":
                await asyncio.sleep(600)
            case "spin":
                time.sleep(600)
            case "raise":
                raise RuntimeError("broken")
            case "megabytes":
                return "x" * (8 << 20)
            case "nonsense":
                return {"role": "user"}
            case "no message":
                return []
            case "leak":
                self.kept.append(bytearray(4 << 30))
            case "exit":
                os._exit(3)
        return "go on"


class NoStep:
    async def start(self, task):
        pass
