//! NCCL's table of costs: one time in microseconds for each algorithm and protocol, negative where NCCL does not allow
//! the pair. NCCL runs the cheapest entry.
//!
//! A preference writes one entry: the cheapest protocol of the preferred algorithm becomes free (0). All others stay,
//! so that NCCL's choice of protocol by size is kept. Entries are never made negative: NCCL 2.22 to 2.30 skips
//! negative entries when it looks for the cheapest, its later cost model (`src/tuning/tuning.cc`) does not, and would
//! take them first.

use crate::algorithm::{Algorithm, COLLNET_CHAIN, COLLNET_DIRECT, NVLS};

/// Most entries that a table is believed to have; NCCL's has 7 x 3.
pub const MOST_ENTRIES: usize = 1024;

/// A table that is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// There is none.
    #[error("NCCL passed no cost table, or one at an address that cannot be")]
    Missing,
    /// Not the shape that the interface promises.
    #[error("NCCL passed a cost table of {algorithms} algorithms and {protocols} protocols")]
    Shape {
        /// As passed.
        algorithms: i32,
        /// As passed.
        protocols: i32,
    },
}

/// What became of a preference for one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// NCCL would have chosen otherwise, and now chooses this.
    Steered {
        /// NCCL's number.
        algorithm: usize,
        /// NCCL's number.
        protocol: usize,
    },
    /// NCCL's own choice has the preferred shape: nothing was changed.
    Same,
    /// NCCL's own choice reduces in the switch or in the network, of which a decision knows nothing: it stands.
    Offloaded,
    /// NCCL allows no entry of the preferred shape here: its own choice stands.
    Forbidden,
    /// The table could not be used: NCCL's own choice stands.
    Unusable(TableError),
}

/// Checks what NCCL says about a table before anything is read: the number of entries.
pub fn entries(algorithms: i32, protocols: i32) -> Result<usize, TableError> {
    let shape = TableError::Shape { algorithms, protocols };
    let (rows, columns) = (usize::try_from(algorithms), usize::try_from(protocols));
    let (Ok(rows), Ok(columns)) = (rows, columns) else { return Err(shape) };
    match rows.checked_mul(columns) {
        Some(entries) if (1..=MOST_ENTRIES).contains(&entries) => Ok(entries),
        _ => Err(shape),
    }
}

/// Makes NCCL take the preferred shape, where it may. `costs` are microseconds, algorithm by algorithm, `protocols`
/// (at least 1) to each.
pub fn prefer(costs: &mut [f32], protocols: usize, shape: Algorithm) -> Outcome {
    let rows = costs.len() / protocols;
    let preferred = |row: &usize| shape.rows().contains(row);
    let Some(at) = cheapest(costs, protocols, (0..rows).filter(preferred)) else { return Outcome::Forbidden };
    let Some(other) = cheapest(costs, protocols, (0..rows).filter(|row| !preferred(row))) else { return Outcome::Same };
    // A tie falls differently between versions of NCCL, so it is decided here.
    if costs[at] < costs[other] {
        return Outcome::Same;
    }
    if [COLLNET_DIRECT, COLLNET_CHAIN, NVLS].contains(&(other / protocols)) {
        return Outcome::Offloaded;
    }
    if costs[other] == 0.0 {
        // Somebody else has forced it, and nothing is cheaper than free.
        return Outcome::Forbidden;
    }
    costs[at] = 0.0;
    Outcome::Steered { algorithm: at / protocols, protocol: at % protocols }
}

/// The place of the cheapest entry that is allowed, the first one of equals.
fn cheapest(costs: &[f32], protocols: usize, rows: impl Iterator<Item = usize>) -> Option<usize> {
    let entries = rows.flat_map(|row| row * protocols..(row + 1) * protocols);
    // Infinite and NaN entries are not times.
    let allowed = entries.filter(|at| costs[*at] >= 0.0 && costs[*at].is_finite());
    allowed.reduce(|best, at| if costs[at] < costs[best] { at } else { best })
}

#[cfg(test)]
mod tests;
