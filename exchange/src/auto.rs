//! STAR or VAR, by measured skew and staleness (the paper's future work).
//!
//! STAR takes turns: every rank's largest values count every N steps, at no cost. VAR lets the rank with the most
//! energy lead: better when ranks differ, but it costs a message, and a rank that never leads goes stale. So: VAR
//! while ranks differ, STAR while they do not, and under VAR a rank that has not led for too long leads next.
//! Everything is computed from values that are the same on all ranks; none branches alone.

use flexcomm_domain::Selection;

/// Share of the past in the average of the skew: it forgets within about 20 steps.
const KEEP: f64 = 0.95;
/// Skew (standard deviation over mean of ‖g_e‖ over ranks) above which VAR begins, and below which it ends.
const ENTER: f64 = 0.25;
const LEAVE: f64 = 0.15;
/// Staleness, in rounds of N steps, after which a rank leads whatever its energy.
const MOST_ROUNDS: u64 = 4;

/// Who leads a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leader {
    /// This rank; no message is needed to find it.
    Rank(u32),
    /// Whoever has the most energy.
    Largest,
}

impl Leader {
    /// By this selection in a step.
    pub fn of(selection: Selection, step: u64, world: u32) -> Self {
        match selection {
            Selection::Star => Self::Rank((step % u64::from(world.max(1))) as u32),
            Selection::Var => Self::Largest,
        }
    }

    /// Whether this rank may turn out to be it.
    pub fn may_be(self, rank: u32) -> bool {
        match self {
            Self::Rank(leader) => leader == rank,
            Self::Largest => true,
        }
    }
}

/// The state, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoSelection {
    mode: Selection,
    skew: f64,
    /// Steps since each rank led.
    stale: Vec<u64>,
}

impl AutoSelection {
    /// Begins with STAR.
    pub fn new(world: u32) -> Self {
        Self { mode: Selection::Star, skew: 0.0, stale: vec![0; world as usize] }
    }

    /// Which of the two is running.
    pub fn mode(&self) -> Selection {
        self.mode
    }

    /// Average of the standard deviation over the mean of ‖g_e‖ over ranks.
    pub fn skew(&self) -> f64 {
        self.skew
    }

    /// Steps since the rank led that has waited the longest.
    pub fn staleness(&self) -> u64 {
        self.stale.iter().copied().max().unwrap_or(0)
    }

    /// Who leads in a step.
    pub fn leader(&self, step: u64) -> Leader {
        let stalest = self.stalest().filter(|_| self.mode == Selection::Var);
        stalest.map_or_else(|| Leader::of(self.mode, step, self.stale.len() as u32), Leader::Rank)
    }

    fn stalest(&self) -> Option<u32> {
        let longest = self.staleness();
        let too_long = longest >= MOST_ROUNDS * self.stale.len() as u64;
        // The lowest among equals.
        let rank = self.stale.iter().position(|s| *s == longest)?;
        too_long.then_some(rank as u32)
    }

    /// Takes in a step: who led, and the sums over ranks of ‖g_e‖ and ‖g_e‖².
    pub fn observe(&mut self, leader: u32, norms: f64, squares: f64) {
        for (rank, stale) in self.stale.iter_mut().enumerate() {
            *stale = if rank == leader as usize { 0 } else { *stale + 1 };
        }
        let world = self.stale.len() as f64;
        let mean = norms / world;
        if !(mean > 0.0 && squares.is_finite()) {
            return;
        }
        let variance = (squares / world - mean * mean).max(0.0);
        self.skew = KEEP * self.skew + (1.0 - KEEP) * (variance.sqrt() / mean);
        match self.mode {
            Selection::Star if self.skew > ENTER => self.mode = Selection::Var,
            Selection::Var if self.skew < LEAVE => self.mode = Selection::Star,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs with ranks of these norms; answers how often each led.
    fn run(auto: &mut AutoSelection, norms: &[f64], steps: u64) -> Vec<u64> {
        let mut led = vec![0; norms.len()];
        for step in 0..steps {
            let largest = norms.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            let leader = match auto.leader(step) {
                Leader::Rank(rank) => rank as usize,
                Leader::Largest => largest,
            };
            led[leader] += 1;
            auto.observe(leader as u32, norms.iter().sum(), norms.iter().map(|n| n * n).sum());
        }
        led
    }

    #[test]
    fn equal_ranks_take_turns() {
        let mut auto = AutoSelection::new(4);
        assert_eq!(run(&mut auto, &[1.0, 1.1, 0.9, 1.0], 100), [25; 4]);
        assert_eq!(auto.mode(), Selection::Star);
    }

    #[test]
    fn unequal_ranks_are_led_by_the_largest_and_nobody_goes_stale() {
        let mut auto = AutoSelection::new(4);
        let led = run(&mut auto, &[1.0, 1.0, 1.0, 5.0], 400);
        assert_eq!(auto.mode(), Selection::Var);
        assert!(led[3] > 250, "{led:?}");
        assert!(led[..3].iter().all(|n| *n >= 10), "{led:?}");
        assert!(auto.staleness() <= MOST_ROUNDS * 4 + 4);
        run(&mut auto, &[1.0; 4], 100);
        assert_eq!(auto.mode(), Selection::Star, "back when the ranks are alike again");
    }

    #[test]
    fn zeros_and_infinities_change_nothing() {
        let mut auto = AutoSelection::new(2);
        auto.observe(0, 0.0, 0.0);
        auto.observe(0, f64::INFINITY, f64::INFINITY);
        assert_eq!((auto.skew(), auto.mode(), auto.staleness()), (0.0, Selection::Star, 2));
    }
}
