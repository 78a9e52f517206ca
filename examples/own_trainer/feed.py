"""Feeding without a prompt file: `python examples/own_trainer/feed.py REDIS_URL RUN_NAME HOW_MANY`."""

import sys

import anyio

from penstock.trainer import Feed, Prompt, connect


async def main(redis, run, total):
    async with connect(redis, run) as connection:
        feed = Feed(connection, max_queued_prompts=64)
        cursor = await feed.cursor()  # where the last feeder stopped; its format is up to the feeder
        for number in range(int(cursor.removeprefix("row ") or 0), total):
            message = {"role": "user", "content": str(number)}
            prompt = Prompt(id=f"own:0:{number}", messages=[message], fields={"number": number}, group_size=2)
            await feed.put([prompt], cursor, cursor := f"row {number + 1}")
        await feed.finish()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
