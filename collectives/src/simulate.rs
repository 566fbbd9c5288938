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
/// NIC for bytes·β. Messages that share a NIC go one after the other: those of earlier rounds first, within a round as
/// their ranks are ready for them, and of one rank in the order of the schedule. Those between ranks of one node use no NIC.
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
    let (mut egress, mut ingress) = (Ports::new(links), Ports::new(links));
    let (mut order, mut departures) = (Vec::new(), Vec::new());
    for (round, transfers) in schedule.rounds.iter().enumerate() {
        check_round(schedule, round)?;
        order.clear();
        order.extend(0..transfers.len());
        // Both sorts are stable, so ties keep their order.
        order.sort_by(|a: &usize, b| ready[transfers[*a].from.index()].total_cmp(&ready[transfers[*b].from.index()]));
        departures.clear();
        departures.extend(order.iter().map(|transfer| {
            let Transfer { from, to, chunks, .. } = transfers[*transfer];
            let (link, bytes) = (links.get(from.index(), to.index()), chunks.range());
            let on_wire = (upto[bytes.end] - upto[bytes.start]) * link.bandwidth.beta();
            let left = egress.pass((from.index(), to.index()), ready[from.index()], on_wire);
            Departure { transfer: *transfer, left, first_bit: left - on_wire + link.alpha.get(), on_wire }
        }));
        // First bits that arrive first are received first.
        departures.sort_by(|a, b| a.first_bit.total_cmp(&b.first_bit));
        for d in &departures {
            let (from, to) = (transfers[d.transfer].from.index(), transfers[d.transfer].to.index());
            let done = ingress.pass((to, from), d.first_bit, d.on_wire);
            ready[to] = ready[to].max(done);
            ready[from] = ready[from].max(d.left);
        }
    }
    Ok(ready)
}

/// One direction of every NIC, and of what connects each rank to the others of its node.
struct Ports<'a> {
    links: &'a LinkMatrix,
    /// From when on each is free, seconds: those of nodes, then those of ranks.
    free: Vec<f64>,
}

impl<'a> Ports<'a> {
    fn new(links: &'a LinkMatrix) -> Self {
        Self { links, free: vec![0.0; 2 * links.ranks()] }
    }

    /// A message between a rank and its peer wants to pass from `at` on; answers when its last bit has.
    fn pass(&mut self, (rank, peer): (usize, usize), at: f64, on_wire: f64) -> f64 {
        let (node, ranks) = (self.links.node(rank), self.links.ranks());
        let port = if node == self.links.node(peer) { ranks + rank } else { node };
        let done = self.free[port].max(at) + on_wire;
        self.free[port] = done;
        done
    }
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

fn check_round(schedule: &Schedule, round: usize) -> Result<(), SimulateError> {
    let (ranks, chunks) = (schedule.ranks, schedule.chunks);
    let outside =
        |t: &&Transfer| t.from.index().max(t.to.index()) >= ranks as usize || t.chunks.range().end > chunks as usize;
    match schedule.rounds[round].iter().find(outside) {
        Some(transfer) => Err(SimulateError::Outside { round, transfer: *transfer, ranks, chunks }),
        None => Ok(()),
    }
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
