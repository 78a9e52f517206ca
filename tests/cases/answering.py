"""An environment that answers turns."""


class Cave:
    """Opens at the right word, which has to be said twice."""

    def reset(self, **row):
        self.words = []
        return "You stand before a cave."

    def open(self, key: int) -> str:
        """Use a key."""
        return "No lock."

    def respond(self, message):
        self.words.append(message)
        return None if self.words.count("Sesame") == 2 else "A rumble."

    def get_reward(self):
        return float(self.words.count("Sesame") == 2)
