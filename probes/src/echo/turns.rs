//! When which peer is asked: the requests are spread over the interval, a few at a time.

use crate::Nanos;

/// So many peers have their turn at the same moment: waking up costs more than asking. Their requests take less than a
/// kilobyte, so that the last waits for the others 2 ms at 4 Mbit/s.
const TOGETHER: usize = 4;

/// When in each interval a peer has its turn, as a share of it: the one of this number among so many.
pub fn turn(number: usize, peers: usize) -> f64 {
    (number - number % TOGETHER) as f64 / peers.max(1) as f64
}

/// When the turn comes next, at least half an interval from now: late rounds are left out, not caught up, since a burst would
/// measure its own queue. Intervals begin at the same moment for all, so that those who share a turn go on sharing it.
pub fn next_turn(now: Nanos, turn: f64, interval_s: f64) -> Nanos {
    let (interval, offset) = ((interval_s * 1e9) as u64, (turn * interval_s * 1e9) as u64);
    let rounds = (now.0 + interval / 2).saturating_sub(offset).div_ceil(interval.max(1));
    Nanos(rounds * interval + offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_keeps_its_place_whatever_moved_it() {
        let second = 1_000_000_000;
        for late in [0, 1, 99_999_999] {
            assert_eq!(next_turn(Nanos(7 * second + late), 0.0, 0.2), Nanos(7 * second + second / 5), "{late}");
        }
        assert_eq!(next_turn(Nanos(7 * second + 100_000_001), 0.0, 0.2), Nanos(7 * second + 2 * second / 5));
        assert_eq!(next_turn(Nanos(7 * second + 50_000_000), 0.25, 0.2), Nanos(7 * second + 250_000_000));
        assert_eq!(next_turn(Nanos(0), 0.5, 0.2), Nanos(100_000_000));
    }
}
