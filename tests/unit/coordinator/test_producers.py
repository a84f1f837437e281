"""Named producers: one id per name, and epochs that never meet."""

import pytest

from kera.coordinator import producers
from kera.coordinator.producers import Instance
from kera.core.errors import InvalidArgument
from kera.core.ids import PRODUCER_EPOCHS


def test_each_instance_of_a_name_has_epochs_above_those_before() -> None:
    instance = Instance(7, producers.FIRST_EPOCH)
    taken: set[int] = set()
    for _ in range(5):
        epochs = set(range(instance.first_epoch, instance.first_epoch + PRODUCER_EPOCHS))
        assert not taken or min(epochs) > max(taken)
        taken |= epochs
        instance = producers.successor("loader", instance.record)
        assert instance.producer_id == 7


def test_a_name_ends_when_its_epochs_do() -> None:
    last = (1 << 32) - PRODUCER_EPOCHS
    assert producers.successor("loader", Instance(7, last - PRODUCER_EPOCHS).record) == (7, last)
    with pytest.raises(InvalidArgument, match="1048576 producers with the name 'loader'"):
        producers.successor("loader", Instance(7, last).record)


def test_there_is_room_for_so_many_names() -> None:
    producers.check_room("loader", producers.NAMES_MAX - 1)
    with pytest.raises(InvalidArgument, match="no room for a producer with the new name 'loader'"):
        producers.check_room("loader", producers.NAMES_MAX)


def test_a_name_has_a_record_of_its_own() -> None:
    assert producers.record_key("etl.loader-1") == "producers/etl.loader-1"
