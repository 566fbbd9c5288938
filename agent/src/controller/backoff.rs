//! How long to wait before the next try: pure.

use rand::Rng;
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
/// A controller that is back is found within this time.
const LONGEST: Duration = Duration::from_secs(5);

/// Doubles from try to try, capped; each wait is drawn from its upper half, so that a cluster's agents do not come
/// back in step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backoff {
    tries: u32,
}

impl Backoff {
    /// The next wait.
    pub(crate) fn next(&mut self, rng: &mut impl Rng) -> Duration {
        let full = FIRST.saturating_mul(1 << self.tries.min(10)).min(LONGEST);
        self.tries = self.tries.saturating_add(1);
        full.mul_f64(rng.random_range(0.5..=1.0))
    }

    /// It worked.
    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn waits_grow_to_the_cap_and_vary() {
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..40).map(|_| backoff.next(&mut rng)).collect();
        assert!(waits[0] <= FIRST && waits[0] >= FIRST / 2);
        assert!(waits[10..].iter().all(|w| *w <= LONGEST && *w >= LONGEST / 2));
        assert!(waits[20..].windows(2).any(|w| w[0] != w[1]));
        backoff.reset();
        assert!(backoff.next(&mut rng) <= FIRST);
    }
}
