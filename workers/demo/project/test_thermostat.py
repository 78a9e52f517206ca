from rewards import thrift
from thermostat import Thermostat

from penstock.testing import call, play

ROW = {"start": 18, "target": 21}


def test_the_right_temperature_is_worth_1():
    played = play(Thermostat, [call("heat", degrees=3), "done"], fields=ROW)
    assert played.tool_replies == ["The room has 21 degrees."]
    assert played.reward_value == 1.0


def test_ten_degrees_off_is_worth_nothing():
    assert play(Thermostat, [call("cool", degrees=7), "done"], fields=ROW).reward_value == 0.0


def test_each_further_call_costs():
    played = play(Thermostat, [call("heat", degrees=1), call("heat", degrees=2), "done"], fields=ROW, rewards=[thrift])
    assert [part.reward.value for part in played.parts] == [1.0, 0.5]
