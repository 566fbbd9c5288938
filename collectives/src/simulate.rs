//! The time of a schedule over unequal links: its critical path.

use crate::{Schedule, Transfer};
use flexcomm_domain::{Invalid, LinkMatrix, Seconds};

/// Failed to simulate a schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimulateError {
    /// The matrix is for another number of ranks.
    #[error("simulate a schedule of {schedule} ranks over the links of {matrix} ranks")]
    Ranks {
        /// N of the schedule.
        schedule: u32,
        /// N of the matrix.
        matrix: usize,
    },
    /// Start times are for another number of ranks.
    #[error("simulate a schedule of {schedule} ranks from {given} start times")]
    Starts {
        /// N of the schedule.
        schedule: u32,
        /// How many were given.
        given: usize,
    },
    /// A start time that is negative or not a number.
    #[error("simulate rank {rank} from a start time of {seconds} s")]
    Start {
        /// Whose.
        rank: usize,
        /// As given.
        seconds: f64,
    },
    /// A chunk of negative or unknown size.
    #[error("simulate chunk {chunk} of {bytes} bytes")]
    Bytes {
        /// Which chunk.
        chunk: usize,
        /// As given.
        bytes: f64,
    },
    /// A transfer names a rank or chunk that the schedule does not have.
    #[error("simulate round {round}: {transfer:?} is outside {ranks} ranks and {chunks} chunks")]
    Outside {
        /// Which round.
        round: usize,
        /// The transfer.
        transfer: Transfer,
        /// N.
        ranks: u32,
        /// Chunks of the schedule.
        chunks: u32,
    },
    /// The result is not a duration (over a year).
    #[error("simulate a schedule: {0}")]
    Time(#[from] Invalid),
}

/// Seconds until the last rank is done, all ranks starting together. `bytes_of_chunk` gives real bytes.
///
/// The model: a message occupies its sender's NIC for bytes·β, arrives α later, and occupies its receiver's
/// NIC for bytes·β. Messages of one rank share its NIC one after the other, in the order of the schedule.
/// A rank goes on to its next round when its own sends have left and its own receives are there; there
/// is no barrier between rounds.
pub fn simulate(
    schedule: &Schedule,
    bytes_of_chunk: &dyn Fn(usize) -> f64,
    links: &LinkMatrix,
) -> Result<Seconds, SimulateError> {
    let start = vec![0.0; schedule.ranks as usize];
    let finish = simulate_after(schedule, bytes_of_chunk, links, &start)?;
    Ok(Seconds::new(finish.into_iter().fold(0.0, f64::max))?)
}

/// As [`simulate`], each rank starting at its own time; answers when each rank is done, in seconds. This is how
/// AR-Topk's broadcast is followed by its allreduce, and how a late rank (a straggler) is modelled.
pub fn simulate_after(
    schedule: &Schedule,
    bytes_of_chunk: &dyn Fn(usize) -> f64,
    links: &LinkMatrix,
    start: &[f64],
) -> Result<Vec<f64>, SimulateError> {
    check_inputs(schedule, links, start)?;
    let upto = prefix_bytes(schedule.chunks, bytes_of_chunk)?;
    let mut ready = start.to_vec();
    let mut ingress_free = vec![0.0f64; start.len()];
    let mut departures = Vec::new();
    for (round, transfers) in schedule.rounds.iter().enumerate() {
        depart(schedule, round, &upto, links, &ready, &mut departures)?;
        // First bits that arrive first are received first; the sort is stable, so ties keep their order.
        departures.sort_by(|a, b| a.first_bit.total_cmp(&b.first_bit));
        for d in &departures {
            let t = &transfers[d.transfer];
            let done = ingress_free[t.to.index()].max(d.first_bit) + d.on_wire;
            ingress_free[t.to.index()] = done;
            ready[t.to.index()] = ready[t.to.index()].max(done);
            ready[t.from.index()] = ready[t.from.index()].max(d.left);
        }
    }
    Ok(ready)
}

struct Departure {
    transfer: usize,
    /// When the sender's NIC is free again.
    left: f64,
    /// When the first bit reaches the receiver.
    first_bit: f64,
    /// bytes·β.
    on_wire: f64,
}

fn depart(
    schedule: &Schedule,
    round: usize,
    upto: &[f64],
    links: &LinkMatrix,
    ready: &[f64],
    out: &mut Vec<Departure>,
) -> Result<(), SimulateError> {
    out.clear();
    let mut egress_free = ready.to_vec();
    for (transfer, t) in schedule.rounds[round].iter().enumerate() {
        let (from, to, range) = (t.from.index(), t.to.index(), t.chunks.range());
        if from.max(to) >= ready.len() || range.end >= upto.len() {
            let (ranks, chunks) = (schedule.ranks, schedule.chunks);
            return Err(SimulateError::Outside { round, transfer: *t, ranks, chunks });
        }
        let link = links.get(from, to);
        let on_wire = (upto[range.end] - upto[range.start]) * link.bandwidth.beta();
        let begin = egress_free[from];
        egress_free[from] = begin + on_wire;
        out.push(Departure { transfer, left: begin + on_wire, first_bit: begin + link.alpha.get(), on_wire });
    }
    Ok(())
}

fn check_inputs(schedule: &Schedule, links: &LinkMatrix, start: &[f64]) -> Result<(), SimulateError> {
    let n = schedule.ranks as usize;
    if links.ranks() != n {
        return Err(SimulateError::Ranks { schedule: schedule.ranks, matrix: links.ranks() });
    }
    if start.len() != n {
        return Err(SimulateError::Starts { schedule: schedule.ranks, given: start.len() });
    }
    match start.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
        Some(rank) => Err(SimulateError::Start { rank, seconds: start[rank] }),
        None => Ok(()),
    }
}

/// `upto[c]` is the bytes of all chunks before c.
fn prefix_bytes(chunks: u32, bytes_of_chunk: &dyn Fn(usize) -> f64) -> Result<Vec<f64>, SimulateError> {
    let mut upto = Vec::with_capacity(chunks as usize + 1);
    let mut sum = 0.0;
    upto.push(sum);
    for chunk in 0..chunks as usize {
        let bytes = bytes_of_chunk(chunk);
        if !(bytes.is_finite() && bytes >= 0.0) {
            return Err(SimulateError::Bytes { chunk, bytes });
        }
        sum += bytes;
        upto.push(sum);
    }
    Ok(upto)
}
