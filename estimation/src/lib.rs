//! Pure: what is believed of links, collectives, compressors and gains, and how surely.
//!
//! Every quantity is normally distributed on the scale on which its errors are ([`Joint`]): times and rates in their logarithm, gains
//! in ln(-ln(1 - gain)). Observations narrow what is believed, time and changes of the network widen it. [`Draws`] gives
//! samples of all of it at once, the same ones for every strategy, so that two strategies differ by what they do not have in
//! common.

pub mod changes;
pub mod compress;
pub mod draws;
pub mod exchange;
pub mod gains;
pub mod joint;
mod networks;
pub mod step;

pub use changes::Changes;
pub use compress::CompressTimes;
pub use draws::{DRAWS, Draws};
pub use exchange::{CriticalPath, Exchange, TEST_TELLS_S, test_sd};
pub use gains::Gains;
pub use joint::{Joint, Normal, Row};
pub use step::{Compute, Cost, Costs, Shape};
