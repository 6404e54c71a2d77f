"""Two rewards: answers of few words, and an answer that holds a number of the problem's own metadata."""


def brevity(completion: str) -> float:
    words = len(completion.split())
    return max(0.0, 1.0 - words / 200)


async def names_the_level(completion: str, metadata: dict, finish: str) -> tuple[float, dict[str, float]]:
    named = str(metadata.get("level", "")) in completion
    return float(named and finish == "stop"), {"cut_off": float(finish == "length")}
