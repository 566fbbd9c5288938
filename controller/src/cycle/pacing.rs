//! When the loop passes: at a tick, or soon after news. Pure: times are since its start, and arguments.

use std::time::Duration;

use crate::config::Config;

/// What ranks and links report of the same moment arrives within this time.
const TOGETHER: Duration = Duration::from_millis(20);

/// Windows of old data are cut this often.
const TRIM_EVERY: Duration = Duration::from_secs(60);

/// The loop's times.
#[derive(Debug)]
pub struct Pacing {
    tick: Duration,
    debounce: Duration,
    next_tick: Duration,
    next_trim: Duration,
    /// When it passes for what woke it.
    woken: Option<Duration>,
    /// When the newest pass ended.
    ended: Duration,
}

/// What is due with a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// Old data is to be forgotten before it.
    pub trim: bool,
}

impl Pacing {
    /// The first pass is at the start.
    pub fn new(config: &Config) -> Self {
        let (tick, debounce) = (config.tick, config.debounce);
        let (next_tick, next_trim, woken, ended) = Default::default();
        Self { tick, debounce, next_tick, next_trim, woken, ended }
    }

    /// When the next pass begins. One that news asked for comes first, and looks at what is there at the tick, too.
    pub fn next(&self) -> Duration {
        self.woken.unwrap_or(self.next_tick)
    }

    /// Whether the next pass is for news; more of them then wait for the pass after it.
    pub fn is_woken(&self) -> bool {
        self.woken.is_some()
    }

    /// There are news. Those that come alone are looked at at once, what comes in a stream together.
    pub fn wake(&mut self, now: Duration) {
        self.woken = Some((self.ended + self.debounce).max(now + TOGETHER));
    }

    /// A pass begins.
    pub fn begin(&mut self, now: Duration) -> Due {
        self.woken = None;
        self.next_tick = now + self.tick;
        let trim = now >= self.next_trim;
        if trim {
            self.next_trim = now + TRIM_EVERY;
        }
        Due { trim }
    }

    /// A pass has ended.
    pub fn end(&mut self, now: Duration) {
        self.ended = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn news_wait_for_the_debounce_and_a_tick_is_due_so_long_after_the_last_pass() {
        let mut pacing = Pacing::new(&RawConfig::default().validate().unwrap());
        let pass = |pacing: &mut Pacing, at: u64| {
            assert_eq!(pacing.next(), ms(at));
            let due = pacing.begin(ms(at));
            pacing.end(ms(at));
            due.trim
        };
        assert!(pass(&mut pacing, 0));
        // Alone: with what comes within a moment.
        pacing.wake(ms(500));
        assert!(pacing.is_woken());
        assert!(!pass(&mut pacing, 520) && !pacing.is_woken());
        // In a stream: 400 ms after the last pass, and no sooner.
        pacing.wake(ms(521));
        pass(&mut pacing, 920);
        pass(&mut pacing, 2420);
        pacing.wake(ms(2910));
        pass(&mut pacing, 2930);
        assert!(!pass(&mut pacing, 4430));
    }

    #[test]
    fn old_data_is_cut_once_a_minute() {
        let mut pacing = Pacing::new(&RawConfig::default().validate().unwrap());
        let trims = (0..121).filter(|s| pacing.begin(ms(1000 * s)).trim).count();
        assert_eq!(trims, 3);
    }
}
