//! Runs the schedules of `collectives` over the mesh.

use super::mesh::{Incoming, Mesh, MeshError, Outgoing, Tag};
use flexcomm_collectives::{Chunks, GenerateError, Op, Round, Schedule};
use flexcomm_collectives::{allgather, allreduce, binomial_broadcast};
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::add_elements;
use flexcomm_domain::{Collective, Rank};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Which schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Allreduce, as this collective adds up.
    Sum(Collective),
    /// Allgather of equal blocks.
    Gather,
    /// Broadcast from a rank.
    Broadcast(Rank),
}

/// What an exchange works on, cut into chunks.
pub struct Buffer<'a> {
    /// As they travel.
    pub bytes: &'a mut [u8],
    /// Type of the elements that add up, of which they are a whole number; none: they are copied.
    pub element: Option<Element>,
}

impl Buffer<'_> {
    fn range(&self, run: Chunks, chunks: u32) -> Range<usize> {
        let each = self.element.map_or(1, Element::bytes);
        let elements = run.values(self.bytes.len() / each, chunks);
        elements.start * each..elements.end * each
    }

    /// Copies or adds what arrived; `arrived` has the right length.
    fn take(&mut self, run: Chunks, chunks: u32, op: Op, arrived: &[u8]) {
        let range = self.range(run, chunks);
        match (op, self.element) {
            (Op::Reduce, Some(element)) => add_elements(element, &mut self.bytes[range], arrived),
            _ => self.bytes[range].copy_from_slice(arrived),
        }
    }
}

struct View {
    chunks: u32,
    rounds: Vec<Round>,
}

/// Runs exchanges; keeps schedules and buffers.
pub struct Exchanger {
    mesh: Mesh,
    views: BTreeMap<Kind, View>,
    spare: Vec<Vec<u8>>,
    /// Of the step under way.
    next_exchange: u16,
    check: u32,
    sync: Duration,
}

/// A failed exchange.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// Between ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// No schedule for this many ranks.
    #[error(transparent)]
    Schedule(#[from] GenerateError),
}

impl Exchanger {
    /// Over a mesh.
    pub fn new(mesh: Mesh) -> Self {
        Self { mesh, views: BTreeMap::new(), spare: Vec::new(), next_exchange: 0, check: 0, sync: Duration::ZERO }
    }

    /// The connections.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The connections, for the control group.
    pub fn mesh_mut(&mut self) -> &mut Mesh {
        &mut self.mesh
    }

    /// Begins a step: exchanges are numbered anew and their time is counted anew. `check` is that of [`Control::check`].
    ///
    /// [`Control::check`]: flexcomm_trainer::Control::check
    pub fn begin_step(&mut self, check: u32) {
        (self.next_exchange, self.check) = (0, check);
        self.sync = Duration::ZERO;
    }

    /// Time spent in exchanges since [`Exchanger::begin_step`], waiting for late ranks included.
    pub fn sync_time(&self) -> Duration {
        self.sync
    }

    /// The part of [`Exchanger::sync_time`] in which this rank waited for ranks that had not entered yet. Absent
    /// when the ranks do not share a clock.
    pub fn wait_time(&self) -> Option<Duration> {
        Some(self.mesh.wait_time()?.min(self.sync))
    }

    /// Runs a schedule on a buffer; returns when this rank is done with it.
    pub fn run(&mut self, kind: Kind, mut buffer: Buffer<'_>) -> Result<(), ExchangeError> {
        let started = Instant::now();
        let exchange = self.next_exchange;
        if exchange == 0 {
            self.mesh.enter();
        }
        self.next_exchange += 1;
        let view = match self.views.remove(&kind) {
            Some(view) => view,
            None => self.view(kind)?,
        };
        let done = view.rounds.iter().try_for_each(|round| self.round(&view, round, exchange, &mut buffer));
        self.views.insert(kind, view);
        self.sync += started.elapsed();
        Ok(done?)
    }

    fn view(&self, kind: Kind) -> Result<View, GenerateError> {
        // A mesh has at most MAX_WORLD ranks.
        let n = self.mesh.world() as u32;
        let schedule: Schedule = match kind {
            Kind::Sum(collective) => (allreduce(collective).schedule)(n)?,
            Kind::Gather => allgather(n)?,
            Kind::Broadcast(root) => binomial_broadcast(n, root)?,
        };
        Ok(View { chunks: schedule.chunks, rounds: schedule.for_rank(self.mesh.rank()) })
    }

    fn round(&mut self, view: &View, round: &Round, exchange: u16, buffer: &mut Buffer<'_>) -> Result<(), MeshError> {
        // Schedules have at most 2 * 1023 rounds.
        let tag = Tag { exchange, round: round.index as u16 };
        let mut sends = Vec::with_capacity(round.sends.len());
        for send in &round.sends {
            let mut body = self.spare.pop().unwrap_or_default();
            body.clear();
            body.extend_from_slice(&buffer.bytes[buffer.range(send.chunks, view.chunks)]);
            sends.push(Outgoing::new(send.peer, tag, self.mesh.stamp(self.check), body));
        }
        let mut recvs = Vec::with_capacity(round.recvs.len());
        for recv in &round.recvs {
            let mut body = self.spare.pop().unwrap_or_default();
            body.resize(buffer.range(recv.chunks, view.chunks).len(), 0);
            recvs.push(Incoming::new(recv.peer, tag, self.check, body));
        }
        self.mesh.round(&mut sends, &mut recvs)?;
        for (recv, frame) in round.recvs.iter().zip(recvs) {
            buffer.take(recv.chunks, view.chunks, recv.op, frame.body());
            self.spare.push(frame.into_body());
        }
        self.spare.extend(sends.into_iter().map(Outgoing::into_body));
        Ok(())
    }
}
