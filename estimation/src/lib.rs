//! Pure: what is assumed and believed of links, collectives, compressors, gains and what these cost in steps, how surely.
//!
//! Every quantity is normally distributed on the scale on which its errors are ([`Joint`]): times and rates in their logarithm, gains
//! in ln(-ln(1 - gain)). Observations narrow what is believed, time and changes of the network widen it. [`Draws`] gives
//! samples of all of it at once, the same ones for every strategy, so that two strategies differ by what they do not have in
//! common.
//!
//! What nothing has been observed of is assumed: [`Times`] of compressors by a table, gains by [`prior_gain`] and [`Profile`]; and
//! [`Quality`] says what a gain costs in steps.

pub mod changes;
pub mod compress;
pub mod draws;
pub mod exchange;
pub mod gains;
pub mod joint;
mod networks;
mod prior;
pub mod profile;
mod quality;
pub mod step;
mod times;

pub use changes::Changes;
pub use compress::CompressTimes;
pub use draws::{DRAWS, Draws};
pub use exchange::{CriticalPath, Exchange, TEST_TELLS_S, TestKind, test_sd};
pub use gains::Gains;
pub use joint::{Joint, Normal, Row};
pub use prior::{assumed_bytes, known_gain, prior_gain, selected_by_one};
pub use profile::{Profile, ProfileError, ProfilePoint};
pub use quality::{DELAY_STEPS, Delay, Quality, delay_of};
pub use step::{Compute, Cost, Costs, Shape};
pub use times::{Times, TimesError};
