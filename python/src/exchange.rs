//! The part of `Core` that exchanges compressed buckets: the hook asks round by round which collective comes, see
//! `flexcomm_exchange::Bucket`. The session is locked for moments only; the work on a bucket's values holds that bucket alone, so
//! that the end of one bucket's collective and the next bucket's compression run side by side.

use crate::core::Core;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::names::{half_code, is_cast};
use crate::session::{Running, Session};
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::Step;
use flexcomm_compression::wire::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use flexcomm_exchange::{Answers, Bucket, ExchangeError, How, Leader, Ran, Round, Shared, lock};
use flexcomm_trainer::{Heard, Status, Tick};
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
    /// Elements of the buffer, bytes of what is gathered or broadcast; control header included.
    pub elements: usize,
    /// Of these at the end, how many are summed by themselves.
    pub apart: usize,
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

    /// The round under way, and what its control header covers besides the agreement.
    pub(crate) fn round(&self, values: usize) -> (Round, usize) {
        self.with(|bucket| (bucket.round(), self.running.tag(values, (self.step, bucket.is_restored()))))
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

/// A control header's number for the agreement: only a bucket's first has room for a plan.
fn number(index: usize, header: u32) -> u32 {
    index as u32 | header << 24
}

/// Bytes that the control header takes in front of what is gathered or behind what adds up.
pub(crate) fn header_bytes(session: &Session, index: usize, round: &Round) -> usize {
    let Some(header) = round.header else { return 0 };
    match round.how {
        How::Gather => session.riding.bytes(number(index, header)),
        How::Sum(element) => session.riding.bits(number(index, header)) * element.bytes(),
        How::Broadcast(_) | How::Refused => 0,
    }
}

pub(crate) fn described(session: &Session, (index, n): (usize, usize), round: &Round) -> Result<RoundPy, Failure> {
    let bytes = round.bytes + header_bytes(session, index, round);
    let (how, each) = match round.how {
        How::Gather => (HowPy::Gather, 1),
        How::Broadcast(_) => (HowPy::Broadcast, 1),
        How::Sum(element @ Element::F32) => (HowPy::SumF32, element.bytes()),
        How::Sum(element @ Element::F16) => (HowPy::SumF16, element.bytes()),
        How::Sum(element @ Element::Bf16) => (HowPy::SumBf16, element.bytes()),
        How::Refused => (HowPy::Refused, 1),
    };
    let first = index == 0 && round.header == Some(0) && matches!(round.how, How::Sum(_));
    let apart = if first { session.apart(&session.now()?, false, n) } else { 0 };
    let root = if let How::Broadcast(root) = round.how { root } else { 0 };
    Ok(RoundPy { how, elements: bytes / each, apart, root, last: round.last })
}

/// Zeros and ones in an element type.
fn write_elements(element: Element, values: &[f32], out: &mut [u8]) {
    let mut halves = vec![0u16; values.len()];
    match element {
        Element::F32 => {
            out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
            return;
        }
        Element::F16 => f32_to_f16(values, &mut halves),
        Element::Bf16 => f32_to_bf16(values, &mut halves),
    }
    out.as_chunks_mut::<2>().0.iter_mut().zip(halves).for_each(|(to, half)| *to = half.to_le_bytes());
}

fn read_elements(element: Element, from: &[u8]) -> Vec<f32> {
    if element == Element::F32 {
        return from.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    }
    let halves: Vec<u16> = from.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    let mut out = vec![0.0; halves.len()];
    let widen = if element == Element::F16 { f16_to_f32 } else { bf16_to_f32 };
    widen(&halves, &mut out);
    out
}

/// Takes the control headers off what arrived: what all ranks said (none where there is no header), and the payloads.
fn split_headers<'a>(
    session: &mut Session,
    (index, tag): (usize, usize),
    round: &Round,
    arrived: &'a [u8],
) -> Result<(Option<Heard>, Vec<&'a [u8]>), Failure> {
    let front = header_bytes(session, index, round);
    match (round.how, round.header) {
        (How::Refused, _) => Ok((None, Vec::new())),
        (How::Broadcast(_), _) => Ok((None, vec![arrived])),
        (How::Sum(element), Some(header)) => {
            let (payload, bits) = arrived.split_at(round.bytes.min(arrived.len()));
            let heard = session.riding.hear_bits(number(index, header), tag, &read_elements(element, bits))?;
            Ok((Some(heard), vec![payload]))
        }
        (How::Sum(_), None) => Ok((None, vec![arrived])),
        (How::Gather, header) => {
            let each = (round.bytes + front).max(1);
            let blocks: Vec<_> = arrived.chunks_exact(each).map(|block| block.split_at(front)).collect();
            let payloads = if round.bytes + front == 0 {
                // No rank sends anything; every message is empty.
                vec![&[][..]; session.world as usize]
            } else {
                blocks.iter().map(|block| block.1).collect()
            };
            let Some(header) = header else { return Ok((None, payloads)) };
            let heads = blocks.iter().map(|block| block.0);
            Ok((Some(session.riding.hear_bytes(number(index, header), tag, heads)?), payloads))
        }
    }
}

/// Writes this rank's control header, where the round has one.
pub(crate) fn write_header(
    session: &Session,
    (index, tag): (usize, usize),
    (round, status): (&Round, Status),
    out: &mut [u8],
) -> Result<(), Failure> {
    let Some(header) = round.header else { return Ok(()) };
    let number = number(index, header);
    match round.how {
        How::Refused | How::Broadcast(_) => {}
        How::Gather => session.riding.write_bytes(number, tag, status, out)?,
        How::Sum(element) => {
            let mut bits = vec![0.0; session.riding.bits(number)];
            session.riding.write_bits(number, tag, status, &mut bits)?;
            write_elements(element, &bits, out);
        }
    }
    Ok(())
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
        (index, n): (usize, usize),
        arrived: &[u8],
        next: impl FnOnce(&mut Bucket, &Heard, &[&[u8]]) -> Result<Round, ExchangeError>,
    ) -> Result<RoundPy, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round(n);
        let (heard, parts) = {
            let mut session = self.lock();
            session.meter.landed(true);
            split_headers(&mut session, (index, tag), &round, arrived)?
        };
        let next = exchange.with(|bucket| next(bucket, &heard.unwrap_or_default(), &parts))?;
        let mut session = self.lock();
        session.meter.hook_work(began);
        described(&session, (index, n), &next)
    }

    /// After the last round of a bucket of n values: `finish` makes the mean of what arrived. Answers whether it is finite.
    pub(crate) fn finished(
        &self,
        (index, n): (usize, usize),
        arrived: &[u8],
        finish: impl FnOnce(&mut Bucket, Option<&Heard>, &[&[u8]]) -> Result<Ran, ExchangeError>,
    ) -> Result<bool, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round(n);
        let (heard, parts) = {
            let mut session = self.lock();
            if round.how != How::Refused {
                session.meter.landed(false);
            }
            split_headers(&mut session, (index, tag), &round, arrived)?
        };
        self.ended(began, &exchange, |bucket| finish(bucket, heard.as_ref(), &parts))
    }

    /// Ends an exchange by `finish`, in the work since `began`. Answers whether the mean is finite.
    fn ended(
        &self,
        began: Instant,
        exchange: &Exchange,
        finish: impl FnOnce(&mut Bucket) -> Result<Ran, ExchangeError>,
    ) -> Result<bool, Failure> {
        let (ran, energy, led) = exchange.with(|bucket| (finish(bucket), bucket.energy(), bucket.led()));
        let ran = ran?;
        let mut session = self.lock();
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
    pub(crate) fn judged(&self, (index, n): (usize, usize), headers: &[u8], outcome: &[u8]) -> Result<bool, Failure> {
        let began = Instant::now();
        let exchange = self.lock().exchange(index)?;
        let (round, tag) = exchange.round(n);
        let bytes = exchange.with(|bucket| bucket.message_header_bytes());
        let (heard, headers) = {
            let mut session = self.lock();
            session.meter.landed(false);
            split_headers(&mut session, (index, tag), &Round { bytes, ..round }, headers)?
        };
        let heard = &heard.unwrap_or_default();
        self.ended(began, &exchange, |bucket| bucket.judge(Answers { heard, headers: &headers, outcome }))
    }
}

#[pymethods]
impl Core {
    /// Begins a bucket with `n` values at `gradient` (0: not float32 on the CPU, then it is exchanged as it is, unless it
    /// can be compressed otherwise, `elsewhere`: on its device, or in a copy). Answers whether it is exchanged by rounds (see
    /// `begin_exchange`); if not, it is dense: elements of the control header, whether it is piggybacked in this step, and the type
    /// that it travels in: 0 its own, 1 float16, 2 bfloat16.
    #[pyo3(signature = (index, gradient, n, elsewhere=false))]
    fn enter(
        &self,
        py: Python<'_>,
        index: usize,
        gradient: usize,
        n: usize,
        elsewhere: bool,
    ) -> PyResult<(bool, usize, bool, i64)> {
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
            let fallback = (gradient == 0 && !elsewhere || !settled) || n == 0;
            if gradient != 0 {
                // What is on the host looks at the residual too.
                bucket.copy_to_host()?;
            }
            let half = Session::half_of(&tick);
            let cast = is_cast(&tick.strategy) && (tick.strategy.is_dense() || half != 0);
            // Copies for shadows that look on the host are no part of the strategy.
            let copied = session.shadow_on_host && session.watches();
            session.meter.faithful &= (!fallback || cast && settled) && !copied;
            if !fallback {
                session.prepare(&tick, &mut bucket)?;
            }
            let exchanged = !fallback && (!cast || bucket.has_residual());
            drop(bucket);
            if gradient != 0 && settled {
                session.observe(index, values.floats())?;
            }
            let bits = session.riding.bits(index as u32);
            let carries = session.carries(&tick, bits);
            Ok((exchanged, bits, carries, if exchanged { 0 } else { half }))
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
            let mut session = self.lock();
            session.meter.hook_work(began);
            described(&session, (index, gradient.len()), &round)
        })
    }

    /// Writes this rank's part of the round of a bucket of `values` values: address and bytes of the round's buffer.
    fn write_round(&self, py: Python<'_>, index: usize, values: usize, out: (usize, usize)) -> PyResult<()> {
        guard(py, || {
            let began = Instant::now();
            let out = Span::new::<u8>("the round's buffer", out.0, out.1)?.bytes_mut();
            let exchange = self.lock().exchange(index)?;
            let (round, tag) = exchange.round(values);
            let need = round.bytes + header_bytes(&self.lock(), index, &round);
            if out.len() != need {
                let (got, index) = (out.len(), exchange.index);
                return Err(Failure::Run(format!(
                    "failed to exchange bucket {index}: a buffer of {got} bytes, not {need}"
                )));
            }
            let (payload, header) = if round.how == How::Gather {
                let (header, payload) = out.split_at_mut(need - round.bytes);
                (payload, header)
            } else {
                out.split_at_mut(round.bytes)
            };
            let status = exchange.with(|bucket| {
                bucket.write(payload);
                bucket.status()
            });
            let mut session = self.lock();
            write_header(&session, (index, tag), (&round, status), header)?;
            let share = share(session.world, need, round.how);
            session.meter.hook_work(began);
            session.meter.launched(share);
            Ok(())
        })
    }

    /// After a round that is not the last: the next one.
    fn next_round(&self, py: Python<'_>, index: usize, values: usize, arrived: (usize, usize)) -> PyResult<RoundPy> {
        guard(py, || {
            let arrived = Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            self.go_on((index, values), arrived, |bucket, heard, parts| bucket.next(heard, parts))
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
            self.finished((index, out.len()), arrived, |bucket, heard, parts| bucket.finish(heard, parts, out))
        })
    }
}
