//! The least gain that a policy admits, with hysteresis: what is in force stays until it falls below the floor, what is
//! not must clear it by a margin.
//!
//! Gains drift as training goes on, and trials and steps measure them with noise. With one threshold for both ways a
//! ratio that keeps about as much as the floor would be left and taken again for as long as the job runs. Two
//! thresholds are the usual remedy, a Schmitt trigger's; for choosing among controllers by a measured quantity it is
//! scale-independent hysteresis switching (Hespanha, Liberzon and Morse, Hysteresis-based switching algorithms for
//! supervisory control of uncertain systems, 2003): the margin is a factor, so that the number of switches is bounded
//! whatever the unit.
//!
//! The factor is one of the odds gain/(1 - gain): for small gains that is the same as floor × (1 + margin), and what
//! clears it stays below 1, whatever the floor.
//!
//! Let what is measured be off by at most a factor n of the odds in either direction. With 1 + margin > n² a gain that
//! does not move is switched once at most, and one whose odds move by a factor r in all, to and fro, at most
//! 1 + ln r / ln((1 + margin)/n²) times.

/// The least gain at which something is chosen anew where `floor` is the least that may stay. `margin` is a share.
pub(crate) fn entry(floor: f64, margin: f64) -> f64 {
    (1.0 + margin) * floor / (1.0 + margin * floor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy, prop, prop_assert, prop_assert_eq, proptest};

    const MARGIN: f64 = 0.25;

    #[test]
    fn the_way_in_is_above_the_way_out_and_dense_always_clears_it() {
        assert_eq!(entry(0.0, MARGIN), 0.0);
        assert_eq!(entry(1.0, MARGIN), 1.0);
        assert!((entry(0.05, MARGIN) - 0.0617).abs() < 1e-4, "a quarter above, for small ones");
        assert!((entry(0.9, MARGIN) - 0.9184).abs() < 1e-4);
    }

    fn of_odds(odds: f64) -> f64 {
        odds / (1.0 + odds)
    }

    /// How often a choice by both thresholds switches over gains as measured.
    fn switches(gains: impl Iterator<Item = f64>, floor: f64, margin: f64) -> usize {
        let (mut chosen, mut count) = (false, 0);
        for gain in gains {
            let stays = gain >= if chosen { floor } else { entry(floor, margin) };
            count += usize::from(stays != chosen);
            chosen = stays;
        }
        count
    }

    /// Truths as odds relative to the floor's and, for each, how far off the measurement is, -1 to 1.
    fn walk() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((-0.05..0.05f64, -1.0..=1.0f64), 1..300)
    }

    proptest! {
        #[test]
        fn a_steady_gain_is_switched_once_at_most(
            floor in 0.001..0.99f64, truth in 0.5..2.0f64, margin in 0.02..2.0f64, noise in walk(), part in 0.0..0.999f64,
        ) {
            let n = (1.0 + margin).powf(0.5 * part);
            let odds = truth * floor / (1.0 - floor);
            let measured = noise.iter().map(|(_, off)| of_odds(odds * n.powf(*off)));
            prop_assert!(switches(measured, floor, margin) <= 1);
        }

        #[test]
        fn a_gain_that_moves_is_switched_as_often_as_its_way_is_long(
            floor in 0.001..0.99f64, margin in 0.02..1.0f64, steps in walk(), part in 0.0..0.9f64,
        ) {
            let n = (1.0 + margin).powf(0.5 * part);
            let (mut at, mut way) = (floor / (1.0 - floor), 0.0);
            let mut measured = Vec::new();
            for (step, off) in &steps {
                at *= step.exp();
                way += step.abs();
                measured.push(of_odds(at * n.powf(*off)));
            }
            let most = 1.0 + way / ((1.0 + margin) / (n * n)).ln();
            let found = switches(measured.into_iter(), floor, margin);
            prop_assert!(found as f64 <= most + 1e-9, "{found} switches, at most {most}");
        }

        #[test]
        fn without_a_margin_both_thresholds_are_one(floor in 0.0..=1.0f64) {
            prop_assert_eq!(entry(floor, 0.0), floor);
        }
    }
}
