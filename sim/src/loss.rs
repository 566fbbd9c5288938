//! What the training loss does.

use flexcomm_domain::Version;
use flexcomm_planner::{LOSS_POINTS, Losses};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// How the loss of a job moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossCourse {
    /// The trainer reports none.
    #[default]
    Unreported,
    /// It falls as training makes progress.
    Falls,
    /// Compressed steps raise it, and dense ones bring it back.
    RisesUnderCompression,
    /// It falls under dense steps alone.
    FlatUnderCompression,
    /// It does not fall at all.
    Flat,
}

impl LossCourse {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Unreported, Self::Falls, Self::RisesUnderCompression, Self::FlatUnderCompression, Self::Flat];
}

/// The loss at the start, and the share of it that training does not get below.
const START: f64 = 2.4;
const LEAST: f64 = 0.1;
/// Dense steps in which the rest falls to 1/e.
const FALLS_IN: f64 = 300.0;
/// What a compressed step adds where compression raises the loss: more than training takes off. At most so much in all.
const RISE: f64 = 0.02;
const MOST_RISEN: f64 = 2.0;
/// What is left of that after a dense step.
const STAYS: f64 = 0.9;
/// Half-width of the noise of one step's loss.
const NOISE: f64 = 0.1;

/// The losses of a run's newest steps.
#[derive(Debug, Clone)]
pub(crate) struct LossLog {
    course: LossCourse,
    /// Dense steps that would have made the same progress.
    learnt: f64,
    /// By how much compression has raised the loss.
    risen: f64,
    /// Steps and their losses, oldest first.
    points: Vec<(u64, Option<f64>)>,
}

impl LossLog {
    pub(crate) fn new(course: LossCourse) -> Self {
        Self { course, learnt: 0.0, risen: 0.0, points: Vec::new() }
    }

    /// One more step, whether it was dense, and its progress in dense steps.
    pub(crate) fn step(&mut self, number: u64, (is_dense, progress): (bool, f64), rng: &mut ChaCha8Rng) {
        self.learnt += match self.course {
            LossCourse::Unreported => return,
            LossCourse::Flat => 0.0,
            LossCourse::FlatUnderCompression if !is_dense => 0.0,
            _ => progress,
        };
        let rises = self.course == LossCourse::RisesUnderCompression && !is_dense;
        self.risen = if rises { (self.risen + RISE).min(MOST_RISEN) } else { STAYS * self.risen };
        let falls = START * (LEAST + (1.0 - LEAST) * (-self.learnt / FALLS_IN).exp());
        self.points.push((number, Some(falls + self.risen + rng.random_range(-NOISE..=NOISE))));
        let oldest = self.points.len().saturating_sub(LOSS_POINTS as usize);
        self.points.drain(..oldest);
    }

    /// The losses before and under a decision that came into force at a step; none while too few steps have run under it.
    pub(crate) fn reported(&self, version: Version, from: u64) -> Option<Losses> {
        Losses::of(&self.points, version, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    /// A hundred dense steps, a decision, and steps that it compresses.
    fn compressed(course: LossCourse, steps: u64) -> Option<Losses> {
        let (mut log, mut rng) = (LossLog::new(course), ChaCha8Rng::seed_from_u64(1));
        (0..100 + steps).for_each(|step| log.step(step, (step < 100, 1.0), &mut rng));
        log.reported(Version(1), 100)
    }

    #[test]
    fn each_course_is_as_it_says() {
        let rise = |course| compressed(course, 100).unwrap().rise();
        assert!(rise(LossCourse::Falls) < -4.0);
        assert!(rise(LossCourse::RisesUnderCompression) > 10.0);
        assert!((-4.0..4.0).contains(&rise(LossCourse::FlatUnderCompression)));
        assert!((-4.0..6.0).contains(&rise(LossCourse::Flat)));
        assert_eq!(compressed(LossCourse::Unreported, 100), None);
    }

    #[test]
    fn too_few_steps_tell_nothing_and_a_long_run_forgets_its_beginning() {
        assert_eq!(compressed(LossCourse::Falls, 21), None);
        let early = compressed(LossCourse::Falls, 22).unwrap();
        assert_eq!((early.newest.first_step, early.newest.last_step), (110, 121));
        assert!((early.began.unwrap() - START).abs() < 2.0 * NOISE);
        let late = compressed(LossCourse::Falls, 200).unwrap();
        assert!(late.began.is_none() && late.before.is_some());
        assert!(compressed(LossCourse::Falls, 400).unwrap().before.is_none());
    }
}
