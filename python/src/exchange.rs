//! The part of `Core` that exchanges compressed buckets: the hook asks round by round which collective comes, see
//! `flexcomm_exchange::Bucket`. The session is locked for moments only; the work on a bucket's values holds that bucket alone, so
//! that the end of one bucket's collective and the next bucket's compression run side by side.

use crate::core::Core;
use crate::device::{CudaStream, Region, on, on_device};
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::names::{half, is_cast};
use crate::session::{Fault, PartStatus, Running, Session};
use flexcomm_compression::Energy;
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::Step;
use flexcomm_exchange::{
    Arrived, Bucket, ExchangeError, HEAD_BYTES, Host, How, Leader, Ran, Round, Shared, Status, head, lock,
};
use flexcomm_trainer::{Tick, squared_norm};
use pyo3::prelude::*;
use std::time::Instant;

/// How a bucket travels that is not dense in its own type.
#[pyclass(eq, hash, frozen)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// By rounds, see `begin_exchange`.
    Rounds,
    /// Dense.
    Float16,
    /// Dense.
    Bfloat16,
}

/// The collective of a round.
#[pyclass(name = "How", eq, frozen)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HowPy {
    Gather,
    Broadcast,
    Sum,
    /// None: all ranks refuse.
    Refused,
}

/// Type of the elements of a buffer.
#[pyclass(name = "Element", eq, hash, frozen, from_py_object)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementPy {
    Byte,
    Float32,
    Float16,
    Bfloat16,
}

/// One collective of an exchange, as the hook runs it.
#[pyclass(name = "Round", frozen, get_all)]
#[derive(Debug)]
pub struct RoundPy {
    /// Which.
    pub how: HowPy,
    /// What its buffer holds; what is gathered has a header in front.
    pub element: ElementPy,
    pub elements: usize,
    /// Whose bytes are broadcast.
    pub root: u32,
    /// Whether it is the exchange's last.
    pub last: bool,
    /// Where the outcome of a message lies that stays on its device, see `add_blocks_on`.
    pub outcome: Option<Region>,
}

/// A bucket with what its exchange needs to know.
pub(crate) struct Exchange {
    index: usize,
    pub(crate) bucket: Shared,
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
        let running = self.running(index)?;
        let leader = self.leader(&tick, index);
        Ok(Exchange { index, bucket: self.store.bucket(index)?, running, step: running.step(&tick), leader })
    }

    /// As [`half`], of a bucket in a step. Decisions and candidates for halves are a pipeline's, whose halves stay finite where the
    /// gradient is, and whose gain is known.
    fn half_of(tick: &Tick, bucket: usize) -> Option<Transfer> {
        half(tick.strategy(bucket)).filter(|_| tick.version.0 == 0 && tick.trial.is_none())
    }

    /// Prepares a bucket for the strategy of the step under way.
    fn prepare(&mut self, tick: &Tick, index: usize, bucket: &mut Bucket) -> Result<(), Failure> {
        let running = self.running(index)?;
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
struct Tagged {
    index: usize,
    tag: u64,
}

impl Tagged {
    /// A header's number: an exchange may have several.
    fn number(self, header: u32) -> u32 {
        self.index as u32 | header << 24
    }
}

fn described(round: &Round, outcome: Option<Region>) -> RoundPy {
    let (how, element, root) = match round.how {
        How::Gather => (HowPy::Gather, ElementPy::Byte, 0),
        How::Broadcast(root) => (HowPy::Broadcast, ElementPy::Byte, root),
        How::Sum(Element::F32) => (HowPy::Sum, ElementPy::Float32, 0),
        How::Sum(Element::F16) => (HowPy::Sum, ElementPy::Float16, 0),
        How::Sum(Element::Bf16) => (HowPy::Sum, ElementPy::Bfloat16, 0),
        How::Refused => (HowPy::Refused, ElementPy::Byte, 0),
    };
    let each = if let How::Sum(element) = round.how { element.bytes() } else { 1 };
    RoundPy { how, element, elements: (round.bytes + round.head_bytes()) / each, root, last: round.last, outcome }
}

/// What all ranks sent.
fn split_headers<'a>(
    session: &Session,
    bucket: Tagged,
    round: &Round,
    arrived: &'a [u8],
) -> Result<Arrived<'a>, Failure> {
    let check = round.header.map_or(0, |header| session.control.check(bucket.number(header), bucket.tag));
    let split = round.split(check, session.world as usize, arrived);
    Ok(split.map_err(|rank| session.control.desynchronised(rank, bucket.index as u32))?)
}

/// This rank's header of a round, where it has one.
fn header_of(session: &Session, bucket: Tagged, round: &Round, status: Status) -> Option<[u8; HEAD_BYTES]> {
    let number = bucket.number(round.header?);
    Some(head(session.control.check(number, bucket.tag), status))
}

/// Bytes that a rank of a ring sends of a message that all sum.
pub(crate) fn sum_share(world: u32, bytes: usize) -> f64 {
    let world = f64::from(world);
    bytes as f64 * (world - 1.0) * 2.0 / world
}

/// Bytes that a rank sends in a round, on average.
fn share(world: u32, bytes: usize, how: How) -> f64 {
    match how {
        How::Gather => bytes as f64 * (f64::from(world) - 1.0),
        How::Sum(_) => sum_share(world, bytes),
        How::Broadcast(_) => sum_share(world, bytes) / 2.0,
        How::Refused => 0.0,
    }
}

impl Core {
    /// After a round, for whose collective the hook `waited`. Of messages that stay on a device the parts are their headers.
    pub(crate) fn arrived<'a>(
        &self,
        index: usize,
        arrived: Span,
        waited: bool,
    ) -> Result<(Exchange, Arrived<'a>), Failure> {
        let arrived = arrived.read::<u8>("what arrived")?;
        let exchange = self.lock().exchange(index)?;
        let (mut round, tag) = exchange.round();
        if exchange.with(|bucket| bucket.stays()) {
            round.bytes = exchange.with(|bucket| bucket.message_header_bytes());
        }
        let mut session = self.lock();
        if waited && round.how != How::Refused {
            session.meter.waited();
        }
        let arrived = split_headers(&session, Tagged { index, tag }, &round, arrived)?;
        drop(session);
        Ok((exchange, arrived))
    }

    /// Ends an exchange by `finish`, in the work since `began`. Answers whether the mean is finite.
    pub(crate) fn ended(
        &self,
        began: Instant,
        exchange: &Exchange,
        finish: impl FnOnce(&mut Bucket) -> Result<Ran, ExchangeError>,
    ) -> Result<bool, Failure> {
        let (ran, energy, values, led, fault) = exchange.with(|bucket| {
            let ran = finish(bucket);
            let fault = Fault { status: bucket.status().into(), why: bucket.fault().to_owned() };
            (ran, bucket.energy(), bucket.values(), bucket.led(), fault)
        });
        let ran = ran?;
        let mut session = self.lock();
        let known = session.fault.as_ref().map_or(PartStatus::Ready, |known| known.status);
        // A codec that failed counts before another bucket's gradient that was not finite.
        let counts = known == PartStatus::Ready || fault.status == PartStatus::Failed && known != PartStatus::Failed;
        if ran == Ran::Refused && counts {
            session.fault = Some(fault);
        }
        if let Some((leader, norms)) = led.filter(|_| ran == Ran::Good) {
            session.observe_leader(leader, norms);
        }
        session.meter.other_work(began);
        let fresh = session.fresh.get(&exchange.index).copied();
        session.meter.kept(energy, values, fresh);
        session.meter.done(energy);
        Ok(ran == Ran::Good)
    }
}

#[pymethods]
impl Core {
    /// Whether the energies of buckets are to be taken in this step that are not on the host: there each waits for the device, so they are
    /// in steps alone in which they are reported.
    fn reports_energies(&self) -> bool {
        self.lock().reports_energies()
    }

    /// Begins a bucket with `n` values at `gradient` (none: not float32 on the CPU, then it is exchanged as it is, unless it
    /// can be compressed otherwise, `on_device`: on its device, or in a copy). `energy` is ‖g‖² of one that is not on the host, where it is
    /// [reported](Self::reports_energies). Answers how it travels; none: dense, as it is.
    #[pyo3(signature = (index, n, gradient, on_device=false, energy=None))]
    fn enter(
        &self,
        py: Python<'_>,
        index: usize,
        n: usize,
        gradient: Option<usize>,
        on_device: bool,
        energy: Option<f64>,
    ) -> PyResult<Option<Transfer>> {
        guard(py, || {
            let values = gradient.map(|address| Span::of_floats(address, n).read::<f32>("the bucket")).transpose()?;
            let fresh = values.filter(|_| self.lock().wants_energies()).map(squared_norm);
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
            let fallback = (gradient.is_none() && !on_device || !settled) || n == 0;
            if gradient.is_some() {
                // What is on the host looks at the residual too.
                bucket.copy_to_host()?;
            }
            let (strategy, half) = (tick.strategy(index), Session::half_of(&tick, index));
            let cast = is_cast(strategy) && (strategy.is_dense() || half.is_some());
            // Copies for shadows that look on the host are no part of the strategy.
            let copied = session.shadows_on_host() && session.watches();
            session.meter.faithful &= (!fallback || cast && settled) && !copied;
            if !fallback {
                session.prepare(&tick, index, &mut bucket)?;
            }
            let exchanged = !fallback && (!cast || bucket.has_residual());
            drop(bucket);
            session.fresh.extend(fresh.map(|fresh| (index, fresh)));
            session.on_device.extend(energy.map(|energy| (index, energy)));
            if !exchanged {
                // There are no energies of it: it sends all of its gradient.
                session.meter.kept(Energy::default(), n, fresh);
            }
            if let Some(values) = values.filter(|_| settled) {
                session.observe(index, values)?;
            }
            Ok(if exchanged { Some(Transfer::Rounds) } else { half })
        })
    }

    /// Compresses a bucket: a float32 gradient on the host, or one of these elements on the device of `stream`. Answers the
    /// first round. `rates` are learning rates: the optimizer's first group's, then, where there are several groups, one for
    /// each of the bucket's parameters. Of one that is not above 0 the last that was counts.
    #[pyo3(signature = (index, gradient, rates, stream=None, element=ElementPy::Float32))]
    fn begin_exchange(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: Span,
        rates: Vec<f64>,
        stream: Option<CudaStream>,
        element: ElementPy,
    ) -> PyResult<RoundPy> {
        guard(py, || {
            let began = Instant::now();
            let exchange = self.lock().exchange(index)?;
            let step = exchange.at(&rates)?;
            let begun = match stream {
                None => {
                    let gradient = gradient.read::<f32>("the bucket")?;
                    let Ok(round) = exchange.with(|bucket| bucket.begin(&Host, gradient, step, exchange.leader));
                    Ok(described(&round, None))
                }
                Some(stream) => {
                    let (device, gradient) = (on(stream)?, on_device(gradient, element)?);
                    exchange.with(|bucket| {
                        let round = bucket.begin(&device, gradient, step, exchange.leader);
                        let outcome = bucket.outcome_on().ok().filter(|_| bucket.stays());
                        round.map(|round| described(&round, outcome.map(Region::from)))
                    })
                }
            };
            self.lock().meter.hook_work(began);
            begun.map_err(Failure::not_on_device)
        })
    }

    /// Writes this rank's part of a bucket's round to the round's buffer; with a `stream` only of a message that stays there.
    #[pyo3(signature = (index, out, stream=None))]
    fn write_round(&self, py: Python<'_>, index: usize, out: Span, stream: Option<CudaStream>) -> PyResult<()> {
        guard(py, || {
            let (began, device) = (Instant::now(), stream.map(on).transpose()?);
            let exchange = self.lock().exchange(index)?;
            let (round, tag) = exchange.round();
            let need = round.head_bytes() + round.bytes;
            let header = |status| header_of(&self.lock(), Tagged { index, tag }, &round, status).unwrap_or_default();
            if let Some(device) = device {
                // Before the bucket is locked: what locks both locks the session first.
                let control = header(Status::Ready);
                let written = exchange.with(|bucket| bucket.write_on(&device, &control, out.on_device()));
                written.map_err(Failure::not_on_device)?;
            } else {
                let out = out.write::<u8>("the round's buffer")?;
                if out.len() != need {
                    let got = out.len();
                    let why = format!("failed to exchange bucket {index}: a buffer of {got} bytes, not {need}");
                    return Err(Failure::Run(why));
                }
                let (front, payload) = out.split_at_mut(round.head_bytes());
                let status = exchange.with(|bucket| {
                    bucket.write(payload);
                    bucket.status()
                });
                front.copy_from_slice(&header(status)[..front.len()]);
            }
            let mut session = self.lock();
            let share = share(session.world, need, round.how);
            session.meter.hook_work(began);
            session.meter.launched(share);
            Ok(())
        })
    }

    /// After a round that is not the last: the next one. What arrived lies on the host; `stream` as in `begin_exchange`.
    #[pyo3(signature = (index, arrived, stream=None))]
    fn next_round(&self, py: Python<'_>, index: usize, arrived: Span, stream: Option<CudaStream>) -> PyResult<RoundPy> {
        guard(py, || {
            let (began, device) = (Instant::now(), stream.map(on).transpose()?);
            let (exchange, arrived) = self.arrived(index, arrived, true)?;
            let next = exchange.with(|bucket| match &device {
                Some(device) => bucket.next(device, &arrived),
                None => bucket.next(&Host, &arrived),
            })?;
            self.lock().meter.hook_work(began);
            Ok(described(&next, None))
        })
    }

    /// After the last round: `out` (float32) becomes the mean gradient. Answers whether it is finite; on a device `out` means
    /// nothing if not.
    #[pyo3(signature = (index, arrived, out, stream=None))]
    fn finish_exchange(
        &self,
        py: Python<'_>,
        index: usize,
        arrived: Span,
        out: Span,
        stream: Option<CudaStream>,
    ) -> PyResult<bool> {
        guard(py, || {
            let (began, device) = (Instant::now(), stream.map(on).transpose()?);
            let (exchange, arrived) = self.arrived(index, arrived, false)?;
            let Some(device) = device else {
                let out = out.write::<f32>("the bucket")?;
                return self.ended(began, &exchange, |bucket| bucket.finish(&Host, &arrived, out));
            };
            self.ended(began, &exchange, |bucket| bucket.finish(&device, &arrived, out.on_device()))
        })
    }
}
