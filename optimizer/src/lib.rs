//! Pure: how good is each choice. Cost models, profiles, NSGA-II, Pareto front, policies.
//!
//! No IO, no clock, no ambient randomness: seeds and times are arguments. The path of a decision:
//! [`Space`] lists the candidates, [`Problem::evaluate`] predicts each one's objectives
//! (t_comp, t_sync, 1/gain) from link matrix, codec sizes and profiles,
//! [`pareto::front`] drops what is dominated, and a [`policy::Policy`] picks one point.
//! A strategy for each bucket makes the space large: [`nsga`] searches it.

pub mod cost;
pub mod enumerate;
pub mod nsga;
pub mod pareto;
pub mod policy;
pub mod prior;
pub mod problem;
pub mod profile;
pub mod quality;
pub mod space;
pub mod terms;
pub mod times;

pub use enumerate::{Solution, solve, solve_among};
pub use nsga::Solver;
pub use policy::{Choice, Policy, PolicyConfig};
pub use prior::{assumed_bytes, known_gain, prior_gain, selected_by_one};
pub use problem::{Evaluated, Evaluator, GainSource, Problem, ProblemError};
pub use profile::{Profile, ProfileError, ProfilePoint};
pub use quality::{DELAY_STEPS, Delay, Quality};
pub use space::{DEFAULT_CRS, Space};
pub use terms::{LAB_BACKEND, Load, Paths, Terms, dense_bytes, terms};
pub use times::{Times, TimesError};
