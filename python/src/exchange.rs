//! The part of `Core` that exchanges compressed buckets: the hook asks round by round which collective comes, see
//! `flexcomm_exchange::Bucket`. The session is locked for moments only; the work on a bucket's values holds that bucket alone, so
//! that the end of one bucket's collective and the next bucket's compression run side by side.

use crate::core::Core;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::names::{half_code, is_cast};
use crate::session::{Fault, Running, Session};
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::Step;
use flexcomm_exchange::{
    Answers, Bucket, ExchangeError, HEAD_BYTES, How, Leader, Ran, Round, Shared, Status, head, lock,
};
use flexcomm_trainer::Tick;
use pyo3::prelude::*;
use std::time::Instant;

/// The collective of a round.
#[pyclass(name = "How", eq, eq_int, hash, frozen, from_py_object)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HowPy {
    /// Bytes are gathered.
    Gather,
    /// Bytes are broadcast.
    Broadcast,
    /// Elements are summed.
    SumF32,
    /// As above.
    SumF16,
    /// As above.
    SumBf16,
    /// None: all ranks refuse.
    Refused,
}

/// One collective of an exchange, as the hook runs it.
#[pyclass(name = "Round", frozen, get_all)]
#[derive(Debug)]
pub struct RoundPy {
    /// Which.
    pub how: HowPy,
    /// Elements of the buffer, bytes of what is gathered or broadcast; with the header in front of what is gathered.
    pub elements: usize,
    /// Whose bytes are broadcast.
    pub root: u32,
    /// Whether it is the exchange's last.
    pub last: bool,
}

/// A bucket with what its exchange needs to know.
pub(crate) struct Exchange {
    pub(crate) bucket: Shared,
    index: usize,
    running: Running,
    step: u64,
    pub(crate) leader: Option<Leader>,
}

impl Exchange {
    pub(crate) fn with<T>(&self, run: impl FnOnce(&mut Bucket) -> T) -> T {
        run(&mut lock(&self.bucket))
    }

    /// The round under way, and what its header covers besides the agreement.
    pub(crate) fn round(&self) -> (Round, u64) {
        self.with(|bucket| (bucket.round(), self.running.tag(bucket.layout(), self.step, bucket.is_restored())))
    }

    /// A step at the first of these rates, with the rates of the bucket's parameters, where there are any.
    pub(crate) fn at(&self, rates: &[f64]) -> Result<Step, ExchangeError> {
        let (first, layers) = rates.split_first().map_or((0.0, rates), |(first, layers)| (*first, layers));
        self.with(|bucket| bucket.layer_rates(layers))?;
        Ok(Step { index: self.step, learning_rate: first })
    }
}

impl Session {
    /// The exchange of a bucket in the step under way.
    pub(crate) fn exchange(&self, index: usize) -> Result<Exchange, Failure> {
        let tick = self.now()?;
        let running = self.running(&tick);
        let leader = tick.strategy.collective().is_art().then(|| self.leader(&tick));
        Ok(Exchange { bucket: self.store.bucket(index)?, index, running, step: running.step(&tick), leader })
    }

    /// As [`half_code`], of a step. Decisions and candidates for halves are a pipeline's, whose halves stay finite where the
    /// gradient is, and whose gain is known.
    fn half_of(tick: &Tick) -> i64 {
        if tick.version.0 == 0 && tick.trial.is_none() { half_code(&tick.strategy) } else { 0 }
    }

    /// Prepares a bucket for the strategy of the step under way.
    fn prepare(&mut self, tick: &Tick, bucket: &mut Bucket) -> Result<(), Failure> {
        let running = self.running(tick);
        // What a checkpoint holds is of the strategy that the user named; no candidate and no decision takes it.
        let own = self.named.is_some_and(|named| named.spec == running.spec);
        let own = own && tick.version.0 == 0 && tick.trial.is_none();
        let saved = if own { self.store.take_state(bucket.params()) } else { None };
        if bucket.spec() != &running.spec
            && let Some(k) = running.spec.k_above(bucket.values())
        {
            let (spec, n) = (running.spec, bucket.values());
            tracing::info!("{spec}: a bucket has {n} values, fewer than k = {k}; all are sent");
        }
        Ok(bucket.prepare(&running.spec, saved.as_deref())?)
    }
}

/// A bucket, and what its headers cover besides the agreement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tagged {
    pub(crate) index: usize,
    pub(crate) tag: u64,
}

impl Tagged {
    /// A header's number: an exchange may have several.
    fn number(self, header: u32) -> u32 {
        self.index as u32 | header << 24
    }
}

pub(crate) fn described(round: &Round) -> RoundPy {
    let bytes = round.bytes + round.head_bytes();
    let (how, each) = match round.how {
        How::Gather => (HowPy::Gather, 1),
        How::Broadcast(_) => (HowPy::Broadcast, 1),
        How::Sum(element @ Element::F32) => (HowPy::SumF32, element.bytes()),
        How::Sum(element @ Element::F16) => (HowPy::SumF16, element.bytes()),
        How::Sum(element @ Element::Bf16) => (HowPy::SumBf16, element.bytes()),
        How::Refused => (HowPy::Refused, 1),
    };
    let root = if let How::Broadcast(root) = round.how { root } else { 0 };
    RoundPy { how, elements: bytes / each, root, last: round.last }
}

/// What all ranks sent: whether some rank's header refuses, and the payloads.
fn split_headers<'a>(
    session: &Session,
    bucket: Tagged,
    round: &Round,
    arrived: &'a [u8],
) -> Result<(bool, Vec<&'a [u8]>), Failure> {
    let check = round.header.map_or(0, |header| session.control.check(bucket.number(header), bucket.tag));
    let split = round.split(check, session.world as usize, arrived);
    Ok(split.map_err(|rank| session.control.desynchronised(rank, bucket.index as u32))?)
}

/// This rank's header of a round, where it has one.
pub(crate) fn header_of(session: &Session, bucket: Tagged, round: &Round, status: Status) -> Option<[u8; HEAD_BYTES]> {
    let number = bucket.number(round.header?);
    Some(head(session.control.check(number, bucket.tag), status))
}

/// Bytes that a rank of a ring sends of a message that all sum or gather.
pub(crate) fn ring_share(world: u32, bytes: usize, gathered: bool) -> f64 {
    let world = f64::from(world);
    let times = if gathered { 1.0 } else { 2.0 / world };
    bytes as f64 * (world - 1.0) * times
}

/// Bytes that a rank sends in a round, on average.
fn share(world: u32, bytes: usize, how: How) -> f64 {
    match how {
        How::Gather => ring_share(world, bytes, true),
        How::Sum(_) => ring_share(world, bytes, false),
        How::Broadcast(_) => ring_share(world, bytes, false) / 2.0,
        How::Refused => 0.0,
    }
}

impl Core {
    /// After a round that is not the last: `next` answers what follows.
    pub(crate) fn go_on(
        &self,
        index: usize,
        arrived: &[u8],
        next: impl FnOnce(&mut Bucket, bool, &[&[u8]]) -> Result<Round, ExchangeError>,
    ) -> Result<RoundPy, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round();
        let (refused, parts) = {
            let mut session = self.lock();
            session.meter.landed(true);
            split_headers(&session, Tagged { index, tag }, &round, arrived)?
        };
        let next = exchange.with(|bucket| next(bucket, refused, &parts))?;
        self.lock().meter.hook_work(began);
        Ok(described(&next))
    }

    /// After the last round: `finish` makes the mean of what arrived. Answers whether it is finite.
    pub(crate) fn finished(
        &self,
        index: usize,
        arrived: &[u8],
        finish: impl FnOnce(&mut Bucket, bool, &[&[u8]]) -> Result<Ran, ExchangeError>,
    ) -> Result<bool, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round();
        let (refused, parts) = {
            let mut session = self.lock();
            if round.how != How::Refused {
                session.meter.landed(false);
            }
            split_headers(&session, Tagged { index, tag }, &round, arrived)?
        };
        self.ended(began, &exchange, |bucket| finish(bucket, refused, &parts))
    }

    /// Ends an exchange by `finish`, in the work since `began`. Answers whether the mean is finite.
    fn ended(
        &self,
        began: Instant,
        exchange: &Exchange,
        finish: impl FnOnce(&mut Bucket) -> Result<Ran, ExchangeError>,
    ) -> Result<bool, Failure> {
        let (ran, energy, led, fault) = exchange.with(|bucket| {
            let ran = finish(bucket);
            let fault = Fault { status: bucket.status(), why: bucket.fault().to_owned() };
            (ran, bucket.energy(), bucket.led(), fault)
        });
        let ran = ran?;
        let mut session = self.lock();
        let known = session.fault.as_ref().map_or(Status::Ready, |known| known.status);
        // A codec that failed counts before another bucket's gradient that was not finite.
        if ran == Ran::Refused && (known == Status::Ready || fault.status == Status::Failed && known != Status::Failed)
        {
            session.fault = Some(fault);
        }
        if let Some((leader, norms)) = led.filter(|_| ran == Ran::Good) {
            session.observe_leader(leader, norms);
        }
        session.meter.other_work(began);
        session.meter.done(energy);
        Ok(ran == Ran::Good)
    }
}

impl Core {
    /// As [`Self::finished`], of messages that stay on a device: what arrived there is added up already, and their headers are
    /// here.
    pub(crate) fn judged(&self, index: usize, headers: &[u8], outcome: &[u8]) -> Result<bool, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round();
        let bytes = exchange.with(|bucket| bucket.message_header_bytes());
        let (refused, headers) = {
            let mut session = self.lock();
            session.meter.landed(false);
            split_headers(&session, Tagged { index, tag }, &Round { bytes, ..round }, headers)?
        };
        self.ended(began, &exchange, |bucket| bucket.judge(Answers { refused, headers: &headers, outcome }))
    }
}

#[pymethods]
impl Core {
    /// Begins a bucket with `n` values at `gradient` (0: not float32 on the CPU, then it is exchanged as it is, unless it
    /// can be compressed otherwise, `on_device`: on its device, or in a copy). Answers whether it is exchanged by rounds (see
    /// `begin_exchange`); if not, it is dense, and the type that it travels in: 0 its own, 1 float16, 2 bfloat16.
    #[pyo3(signature = (index, gradient, n, on_device=false))]
    fn enter(&self, py: Python<'_>, index: usize, gradient: usize, n: usize, on_device: bool) -> PyResult<(bool, i64)> {
        guard(py, || {
            let values = Span::new::<f32>("the bucket", gradient, if gradient == 0 { 0 } else { n })?;
            let mut session = self.lock();
            let tick = session.now()?;
            let shared = session.store.bucket(index)?;
            let mut bucket = lock(&shared);
            if bucket.values() != n {
                let known = bucket.values();
                return Err(Failure::Run(format!("failed to enter bucket {index}: {n} values, known are {known}")));
            }
            bucket.in_trial(tick.trial.is_some())?;
            let passed = session.hooked(index, n);
            let settled = (bucket.enter() > 0 || passed) && session.warm();
            session.settled = settled;
            let fallback = (gradient == 0 && !on_device || !settled) || n == 0;
            if gradient != 0 {
                // What is on the host looks at the residual too.
                bucket.copy_to_host()?;
            }
            let half = Session::half_of(&tick);
            let cast = is_cast(&tick.strategy) && (tick.strategy.is_dense() || half != 0);
            // Copies for shadows that look on the host are no part of the strategy.
            let copied = session.shadows_on_host() && session.watches();
            session.meter.faithful &= (!fallback || cast && settled) && !copied;
            if !fallback {
                session.prepare(&tick, &mut bucket)?;
            }
            let exchanged = !fallback && (!cast || bucket.has_residual());
            drop(bucket);
            if gradient != 0 && settled {
                session.observe(index, values.floats())?;
            }
            Ok((exchanged, if exchanged { 0 } else { half }))
        })
    }

    /// Compresses a bucket; answers the first round. `rates` are learning rates: the optimizer's first group's, then, where there
    /// are several groups, one for each of the bucket's parameters. Of one that is not above 0 the last that was counts.
    fn begin_exchange(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: (usize, usize),
        rates: Vec<f64>,
    ) -> PyResult<RoundPy> {
        guard(py, || {
            let began = Instant::now();
            let gradient = Span::new::<f32>("the bucket", gradient.0, gradient.1)?.floats();
            let exchange = self.lock().exchange(index)?;
            let step = exchange.at(&rates)?;
            let round = exchange.with(|bucket| bucket.begin(gradient, step, exchange.leader));
            self.lock().meter.hook_work(began);
            Ok(described(&round))
        })
    }

    /// Writes this rank's part of a bucket's round: address and bytes of the round's buffer.
    fn write_round(&self, py: Python<'_>, index: usize, out: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let out = Span::new::<u8>("the round's buffer", out.0, out.1)?.bytes_mut();
            let exchange = self.lock().exchange(index)?;
            let (round, tag) = exchange.round();
            let front = round.head_bytes();
            let need = front + round.bytes;
            if out.len() != need {
                let (got, index) = (out.len(), exchange.index);
                return Err(Failure::Run(format!(
                    "failed to exchange bucket {index}: a buffer of {got} bytes, not {need}"
                )));
            }
            let (header, payload) = out.split_at_mut(front);
            let status = exchange.with(|bucket| {
                bucket.write(payload);
                bucket.status()
            });
            let mut session = self.lock();
            if let Some(own) = header_of(&session, Tagged { index, tag }, &round, status) {
                header.copy_from_slice(&own);
            }
            let share = share(session.world, need, round.how);
            session.meter.hook_work(began);
            session.meter.launched(share);
            Ok(())
        })
    }

    /// After a round that is not the last: the next one.
    fn next_round(&self, py: Python<'_>, index: usize, arrived: (usize, usize)) -> PyResult<RoundPy> {
        guard(py, || {
            let arrived = Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            self.go_on(index, arrived, |bucket, refused, parts| bucket.next(refused, parts))
        })
    }

    /// After the last round: `out` becomes the mean gradient. Answers whether it is finite.
    fn finish_exchange(
        &self,
        py: Python<'_>,
        index: usize,
        arrived: (usize, usize),
        out: (usize, usize),
    ) -> PyResult<bool> {
        guard(py, || {
            let arrived = Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            let out = Span::new::<f32>("the bucket", out.0, out.1)?.floats_mut();
            self.finished(index, arrived, |bucket, refused, parts| bucket.finish(refused, parts, out))
        })
    }
}
