//! The exact solver: evaluates every candidate of a space, finds the front, and lets a policy pick.

use crate::problem::Evaluator;
use crate::{Choice, Evaluated, Policy, Problem, ProblemError, Space, pareto};
use flexcomm_domain::Strategy;
use serde::{Deserialize, Serialize};

/// A solved problem, as it goes into a decision's report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Solution {
    /// Every candidate, in the space's order.
    pub candidates: Vec<Evaluated>,
    /// Indices of those on the Pareto front.
    pub front: Vec<usize>,
    /// What the policy picked; its index is into `candidates`.
    pub choice: Choice,
}

impl Solution {
    /// The candidate that was picked.
    pub fn chosen(&self) -> &Evaluated {
        &self.candidates[self.choice.index]
    }
}

/// Evaluates all candidates and picks one by the policy.
pub fn solve(problem: &Problem, space: &Space, policy: &dyn Policy) -> Result<Solution, ProblemError> {
    solve_among(problem, &space.strategies(), policy)
}

/// The same over candidates of several spaces. Dense must be among them.
pub fn solve_among(problem: &Problem, all: &[Strategy], policy: &dyn Policy) -> Result<Solution, ProblemError> {
    let evaluator = Evaluator::new(problem);
    let candidates: Result<Vec<Evaluated>, _> = all.iter().map(|x| evaluator.evaluate(x)).collect();
    let candidates = candidates?;
    let front = pareto::front(&candidates);
    // Not of the front alone: of what one rank selects for all 1/gain is no measure of the steps it takes, see `Quality::inverse_gain`.
    let all: Vec<usize> = (0..candidates.len()).collect();
    let choice = policy.choose(&candidates, &all, problem.compute);
    Ok(Solution { candidates, front, choice })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::TimeToQuality;
    use flexcomm_domain::{Link, LinkMatrix};

    #[test]
    fn the_choice_is_on_the_front_and_the_report_survives_json() {
        let links = LinkMatrix::from_fn(6, |i, j| Link::new(1e-3 * (1 + i + j) as f64, 1e9).unwrap()).unwrap();
        let policy = TimeToQuality::default();
        let solution = solve(&Problem::new(1_000_000, links), &Space::default(), &policy).unwrap();
        let strategies = Space::default().strategies();
        assert!(solution.candidates.iter().map(|candidate| candidate.strategy).eq(strategies));
        assert!(solution.front.contains(&solution.choice.index));
        let best =
            solution.candidates.iter().map(|c| policy.seconds(c.t_step.get(), &c.quality())).fold(f64::MAX, f64::min);
        assert_eq!(solution.choice.score, best);
        let json = serde_json::to_string(&solution).unwrap();
        assert_eq!(serde_json::from_str::<Solution>(&json).unwrap(), solution);
    }

    #[test]
    fn an_impossible_problem_is_an_error() {
        let links = LinkMatrix::uniform(2, Link::new(1e-3, 1e9).unwrap()).unwrap();
        let error = solve(&Problem::new(0, links), &Space::default(), &TimeToQuality::default()).unwrap_err();
        assert_eq!(error.to_string(), "failed to evaluate none/dense-ring: the gradient has no values");
    }
}
