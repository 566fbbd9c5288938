//! Pure: how good is each choice. Cost of a strategy, NSGA-II, Pareto front, policies.
//!
//! No IO, no clock, no ambient randomness: seeds and times are arguments. The path of a decision:
//! [`Space`] lists the candidates, [`Problem::evaluate`] predicts each one's objectives
//! (t_comp, t_sync, 1/gain) from link matrix, codec sizes and [`flexcomm_estimation::Profile`]s,
//! [`pareto::front`] drops what is dominated, and a [`policy::Policy`] picks one point.
//! A strategy for each bucket makes the space large: [`nsga`] searches it.

pub mod cost;
pub mod enumerate;
pub mod nsga;
pub mod pareto;
pub mod policy;
pub mod problem;
pub mod space;
pub mod terms;

pub use enumerate::{Solution, solve, solve_among};
pub use nsga::Solver;
pub use policy::{Choice, Policy, PolicyConfig};
pub use problem::{Evaluated, Evaluator, GainSource, Problem, ProblemError};
pub use space::{DEFAULT_CRS, Space};
pub use terms::{LAB_BACKEND, Load, Paths, Terms, dense_bytes, terms};
