"""Environments whose tools `tool-caller` has not seen: 16 classes with 50 tools, and a prompt for each class.

The methods have no bodies: only their schemas are shown, and calls are validated against their type hints.
"""

from typing import Literal


class Thermostat:
    """Prompt: Make the kitchen 21 degrees."""

    def adjust_temperature(self, degrees: int) -> str:
        """Adjust the temperature."""

    def read_sensor(self, where: Literal["kitchen", "bedroom", "cellar"]) -> int:
        """Read one sensor."""

    def toggle_fan(self, on: bool) -> str:
        """Turn the fan on or off."""


class Maze:
    """Prompt: You are at (2, 3). Reach the treasure."""

    def walk(self, direction: Literal["north", "south", "east", "west"]) -> str:
        """Walk one cell.

        Args:
            direction: Where to go.
        """

    def peek(self) -> str:
        """Look around."""


class Counter:
    """Prompt: Count to 7."""

    def increment(self, by: int = 1) -> int:
        """Add to the counter.

        Args:
            by: How much to add.
        """


class Bank:
    """Prompt: Send 40 euros from alice to bob."""

    def transfer(self, sender: str, receiver: str, amount: int) -> str:
        """Transfer money between two accounts.

        Args:
            sender: Who pays.
            receiver: Who is paid.
            amount: In euros.
        """

    def get_balance(self, account: str) -> int:
        """Return the balance of an account."""

    def list_accounts(self) -> str:
        """List all accounts."""

    def freeze(self, account: str, reason: Literal["fraud", "request", "court"]) -> str:
        """Freeze an account."""


class Elevator:
    """Prompt: Bring the guests from floor 3 to floor 12."""

    def go_to_floor(self, floor: int) -> str:
        """Move the cabin."""

    def open_doors(self) -> str:
        """Open the doors."""

    def close_doors(self) -> str:
        """Close the doors."""


class Chess:
    """Prompt: White to move: e2 e4 or d2 d4."""

    def play_move(self, origin: str, destination: str) -> str:
        """Make a move on the board."""

    def resign(self) -> str:
        """Give up."""

    def offer_draw(self, politely: bool = True) -> str:
        """Offer a draw."""


class Warehouse:
    """Prompt: Pack 6 mugs and 2 plates for order 118."""

    def pick_item(self, sku: str, quantity: int) -> str:
        """Take items from a shelf."""

    def ship_order(self, order_id: int, carrier: Literal["ground", "express"]) -> str:
        """Hand an order to a carrier."""

    def stock_level(self, sku: str) -> int:
        """Return how many are left."""

    def reserve_dock(self, number: int, minutes: int = 30) -> str:
        """Reserve a loading dock."""


class Browser:
    """Prompt: Find the opening hours of the museum."""

    def navigate(self, url: str) -> str:
        """Open a page."""

    def click_element(self, selector: str) -> str:
        """Click on an element."""

    def scroll(self, pixels: int, smooth: bool = False) -> str:
        """Scroll the page."""

    def go_back(self) -> str:
        """Go to the page before."""


class Garden:
    """Prompt: The tomatoes need 15 liters every 2 days."""

    def water_plants(self, bed: Literal["tomatoes", "roses", "herbs"], liters: float) -> str:
        """Water a bed."""

    def schedule_watering(self, every_days: int, at_hour: int) -> str:
        """Water again and again."""

    def weather_forecast(self) -> str:
        """Return the weather of tomorrow."""


class Sql:
    """Prompt: How many customers live in Oslo?"""

    def run_query(self, sql: str) -> str:
        """Run a query and return its rows."""

    def describe_table(self, table_name: str) -> str:
        """Describe the columns."""

    def list_tables(self) -> str:
        """List the tables."""


class Robot:
    """Prompt: Lift the red cube to height 30."""

    def grip(self, force: float, fingers: int = 2) -> str:
        """Close the gripper."""

    def rotate_joint(self, joint: Literal["shoulder", "elbow", "wrist"], degrees: int) -> str:
        """Rotate a joint."""

    def calibrate(self, quickly: bool) -> str:
        """Calibrate all joints."""

    def home(self) -> str:
        """Go to the home position."""


class Travel:
    """Prompt: Two people fly from Lima to Quito on day 14."""

    def search_flights(self, origin: str, destination: str, day: int) -> str:
        """Search for flights."""

    def book_hotel(self, city: str, nights: int, stars: Literal["three", "four", "five"]) -> str:
        """Book a hotel."""

    def cancel_booking(self, booking_id: int) -> str:
        """Cancel a booking."""


class Lights:
    """Prompt: Three lamps: 1 is on, 2 is off, 3 is on."""

    def press(self, lamp: int) -> str:
        """Press the button of a lamp."""

    def dim(self, lamp: int, percent: int) -> str:
        """Dim a lamp."""

    def all_off(self) -> str:
        """Turn everything off."""


class Music:
    """Prompt: Play something by Bach, volume 8."""

    def queue_song(self, title: str, artist: str) -> str:
        """Add a song to the playlist."""

    def set_volume(self, volume: int) -> str:
        """Set the volume."""

    def shuffle_playlist(self, mode: Literal["off", "songs", "albums"]) -> str:
        """Choose an order."""


class Wordle:
    """Prompt: Guess a word of 5 letters."""

    def guess(self, word: str) -> str:
        """Guess the hidden word."""

    def hint(self, position: int) -> str:
        """Reveal one letter."""


class Calendar:
    """Prompt: Move the dentist from 9 to 16 o'clock."""

    def create_event(self, title: str, hour: int, all_day: bool = False) -> str:
        """Create an event."""

    def move_event(self, title: str, new_hour: int) -> str:
        """Move an event."""

    def free_slots(self, weekday: Literal["monday", "tuesday", "friday"]) -> str:
        """Return the free hours of a day."""

    def invite(self, person: str, optional: bool) -> str:
        """Invite a person."""

    def delete_event(self, title: str) -> str:
        """Delete an event."""


ENVIRONMENTS = (
    Thermostat, Maze, Counter, Bank, Elevator, Chess, Warehouse, Browser, Garden, Sql, Robot, Travel, Lights, Music,
    Wordle, Calendar,
)  # fmt: skip


def prompt_of(environment: type) -> str:
    """Return the prompt in the class's docstring."""
    return environment.__doc__.removeprefix("Prompt: ")
