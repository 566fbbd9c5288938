//! A text's strategy on a bucket whose gradient lies on a GPU: kernels compress it there and add messages up there. Messages
//! themselves, which are short, cross to the host and travel as any other rank's: their bytes are those of the host's
//! pipeline, so each rank may choose for itself, in every step. The host waits for the kernels once per bucket, since a message
//! says whether its gradient is finite.

use super::plan::{Decoding, Plan};
use super::{Phase, Piped};
use crate::bucket::{Home, OnHost, Ran};
use crate::error::EngineError;
use flexcomm_compression::Energy;
use flexcomm_compression::Layers as CpuLayers;
use flexcomm_compression::codec::EncodeError;
use flexcomm_compression::pipeline::{Gradient as CpuGradient, Member, Pipeline, Step, factor};
use flexcomm_compression::wire::{Reader, Writer, read_indices};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method};
use flexcomm_gpu_kernels::{At, Copies, LaunchError, OUTCOME_BYTES, Outcome, Quantizer, Span};
use flexcomm_gpu_kernels::{add, add_sized, majority, scatter, three_lc};
use flexcomm_trainer::Heard;

const ALIGN: u64 = 256;

/// Where it lies and what it is made of.
#[derive(Debug)]
pub(super) struct OnDevice {
    layers: Layers,
    /// For what arrives.
    room: Span,
    plan: Plan,
    home: Box<dyn Home>,
    member: Member,
    /// eta at which values are held back, and before the step under way.
    rate: [f64; 2],
    under_way: bool,
    methods: Vec<Method>,
}

/// Bytes for one rank's payload or lists of a layer, or for all ranks' votes.
fn room_bytes(plan: &Plan, methods: &[Method], world: u32) -> u64 {
    let each = plan.lengths().into_iter().zip(methods).map(|(n, method)| method.payload_bytes(n)).max().unwrap_or(0);
    let each = (each + 16).next_multiple_of(ALIGN);
    if plan.decoding == Decoding::Vote { each * u64::from(world) } else { each }
}

fn text(error: &dyn std::fmt::Display) -> EngineError {
    EngineError::State(format!("failed to {error}"))
}

impl Piped {
    fn plan(&self, member: Member) -> Result<(Plan, Vec<Method>), OnHost> {
        let plan = Plan::new(self.pipeline.spec(), self.pipeline.layers(), member)?;
        if !plan.keeps && !self.pipeline.held_back().is_empty() {
            // What an older strategy held back goes out first.
            return Err(OnHost::Text(self.pipeline.spec().to_string()));
        }
        let methods = plan.methods(0).unwrap_or_default();
        Ok((plan, methods))
    }

    /// Bytes of device memory that it needs lent there, aligned to 256; or why kernels cannot do it.
    pub fn lent_bytes(&self, member: Member) -> Result<u64, OnHost> {
        let (plan, methods) = self.plan(member)?;
        Ok(Layers::bytes(&plan.lengths(), &methods)? + room_bytes(&plan, &methods, member.world))
    }

    /// Whether what it holds back lies on a device.
    pub fn is_resident(&self) -> bool {
        self.device.is_some()
    }

    /// Moves what is held back to the device, into memory that `home` lends.
    pub fn reside(
        &mut self,
        device: &impl Copies,
        member: Member,
        (home, lent): (Box<dyn Home>, Span),
    ) -> Result<(), OnHost> {
        let (plan, methods) = self.plan(member)?;
        let lengths = plan.lengths();
        let bytes = Layers::bytes(&lengths, &methods)?;
        let layers = Layers::new(device, (&lengths, &methods), lent.part(0, bytes))?;
        let held = self.pipeline.held_back();
        let mut rest = &held[..];
        for (span, n) in layers.held_back().zip(&lengths) {
            let (own, after) = rest.split_at((*n as usize).min(rest.len()));
            rest = after;
            if own.iter().any(|value| value.to_bits() != 0) {
                let bytes: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
                device.upload(span, &bytes)?;
            }
        }
        let room = lent.part(bytes, room_bytes(&plan, &methods, member.world));
        let rate = [self.pipeline.learning_rate(); 2];
        self.device = Some(OnDevice { layers, room, plan, home, member, rate, under_way: false, methods });
        Ok(())
    }

    /// Moves what is held back to the host. Waits for the device.
    pub fn come_home(&mut self) -> Result<(), EngineError> {
        self.abandon_on_device();
        let Some(own) = &self.device else { return Ok(()) };
        let mut values = Vec::with_capacity(self.pipeline.layers().values());
        for span in own.layers.held_back() {
            let mut bytes = vec![0; span.bytes() as usize];
            own.home.fetch(span, &mut bytes)?;
            values.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
        if own.plan.keeps {
            let (strategy, layers) = (*self.pipeline.spec(), self.pipeline.layers().clone());
            self.pipeline = holding(&strategy, (layers, own.member), (&values, own.rate[0]))?;
        }
        self.device = None;
        Ok(())
    }

    /// A step that was never judged does not count.
    pub(crate) fn abandon_on_device(&mut self) {
        let Some(own) = self.device.as_mut().filter(|own| own.under_way) else { return };
        own.under_way = false;
        if own.plan.keeps {
            own.layers.put_back();
            own.rate[0] = own.rate[1];
        }
    }

    /// As [`Self::begin`], of a gradient on the device. Where it fails, what is held back is as before, and the host can do it.
    pub fn begin_on(&mut self, device: &impl Copies, gradient: Gradient, step: Step) -> Result<super::Turn, OnHost> {
        self.abandon_on_device();
        if self.device.is_none() {
            return Err(OnHost::Absent);
        }
        let unknown = self.pipeline.learning_rate() == super::NO_RATE;
        let step = Step { learning_rate: self.rate(step.learning_rate), ..step };
        self.fault.clear();
        self.status = Default::default();
        self.energy = Energy::default();
        self.step = step;
        let head = self.head(step)?;
        let Some(own) = &mut self.device else { return Err(OnHost::Absent) };
        if unknown {
            own.rate = [self.pipeline.learning_rate(); 2];
        }
        let weight = if own.rate[0] == step.learning_rate { 1.0 } else { own.rate[0] / step.learning_rate };
        if let Some(factors) = self.rates.factors(step.learning_rate).filter(|_| own.plan.keeps) {
            own.rescale(device, self.pipeline.layers(), &factors)?;
        }
        self.rates.applied(step.learning_rate);
        own.methods = own.plan.methods(step.index).unwrap_or_default();
        let gradient = Gradient { weights: (weight as f32, 1.0), ..gradient };
        own.layers.step(device, (gradient, own.plan.keeps), &own.methods)?;
        own.rate = [step.learning_rate, own.rate[0]];
        own.under_way = true;
        match own.fetch(device, (head, self.pipeline.factor_bytes() > 0), &mut self.message) {
            Ok(Some(energy)) => self.energy = energy,
            Ok(None) => {
                self.abandon_on_device();
                self.excuse(&EncodeError::NonFinite { index: 0, value: f32::NAN });
            }
            Err(error) => {
                self.abandon_on_device();
                return Err(error);
            }
        }
        // The pipeline itself only frames messages now: its rate is this step's.
        self.pipeline.rebase(step.learning_rate);
        self.turn = self.first_turn();
        Ok(self.turn)
    }

    /// A step's header, of a pipeline of one value: but for n and the payload's length it is this one's.
    fn head(&self, step: Step) -> Result<Vec<u8>, OnHost> {
        let Some(own) = &self.device else { return Err(OnHost::Absent) };
        let none = || OnHost::Text(self.pipeline.spec().to_string());
        let one = CpuLayers::fused(1).map_err(|_| none())?;
        let (mut twin, mut message) = (Pipeline::new(self.pipeline.spec(), one, own.member), Writer::new());
        twin.compress(CpuGradient::F32(&[0.0]), step, &mut message).map_err(|_| none())?;
        let mut head = message.into_vec();
        head.truncate(self.sum_header());
        head[8..16].copy_from_slice(&(self.pipeline.layers().values() as u64).to_le_bytes());
        Ok(head)
    }

    /// As [`Self::end`]: `out` (f32, on the device) becomes the mean gradient; where some gradient was not finite it is not
    /// written.
    pub fn end_on(
        &mut self,
        device: &impl Copies,
        (heard, parts): (Option<&Heard>, &[&[u8]]),
        out: Span,
    ) -> Result<Ran, EngineError> {
        let phase = std::mem::replace(&mut self.phase, Phase::Idle);
        let refused = match &phase {
            Phase::Refused(heard) => Some(*heard),
            _ => heard.filter(|heard| !heard.good()).copied(),
        };
        if let Some(heard) = refused {
            self.abandon_on_device();
            self.energy = Energy::default();
            return self.refuse(&heard, &mut []);
        }
        let cut: Vec<&[u8]> = match &phase {
            Phase::Bodies(sizes) => {
                parts.iter().zip(sizes).map(|(part, size)| &part[..*size.min(&part.len())]).collect()
            }
            _ => parts.to_vec(),
        };
        let sum = matches!(phase, Phase::Sums(_));
        if sum {
            self.whole_sum(&cut);
        }
        match self.add_up(device, (&cut, sum), out) {
            Ok(ran) => {
                if ran == Ran::Good {
                    self.device.iter_mut().for_each(|own| own.under_way = false);
                } else {
                    self.abandon_on_device();
                }
                Ok(ran)
            }
            Err(error) => {
                self.abandon_on_device();
                Err(error)
            }
        }
    }

    fn add_up(&mut self, device: &impl Copies, (parts, sum): (&[&[u8]], bool), out: Span) -> Result<Ran, EngineError> {
        let header = self.header_bytes();
        let Some(own) = &self.device else {
            return Err(EngineError::Order { bucket: self.index, what: "it does not lie on a device" });
        };
        let head = &self.message.bytes()[..header];
        // Lengths may differ; whatever else does, the host's reader says best.
        let alike = |part: &&[u8]| part.len() >= header && part[..16] == head[..16] && part[24..header] == head[24..];
        let front = header + self.pipeline.factor_bytes();
        let ones = |part: &&[u8]| {
            let factors = part.get(header..front).map(|factors| factors.as_chunks::<4>().0);
            factors.is_some_and(|factors| factors.iter().all(|factor| *factor == 1f32.to_le_bytes()))
        };
        let known = own.plan.decoding != Decoding::Host && (sum || parts.iter().all(|part| alike(part) && ones(part)));
        if known {
            device.zero(out)?;
            let payloads: Vec<&[u8]> =
                if sum { vec![&self.sum[header..]] } else { parts.iter().map(|part| &part[front..]).collect() };
            let scale = 1.0 / if sum { own.member.world.max(1) as f32 } else { parts.len() as f32 };
            if own.add_all(device, (&payloads, scale), out)? {
                return Ok(Ran::Good);
            }
        }
        let mut values = vec![0.0; self.pipeline.layers().values()];
        let index = self.step.index;
        let read = match sum {
            true => self.pipeline.mean(&self.sum, index, &mut values),
            false => self.pipeline.aggregate(parts, index, &mut values),
        };
        match read {
            Ok(()) => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                device.upload(out, &bytes)?;
                Ok(Ran::Good)
            }
            Err(flexcomm_compression::codec::ReadError::Number { .. }) => Ok(Ran::NotFinite),
            Err(source) => Err(EngineError::Text { bucket: self.index, source }),
        }
    }
}

/// A pipeline that holds back these values, in units of gradients at `rate`.
fn holding(
    strategy: &CompressorSpec,
    (layers, member): (CpuLayers, Member),
    (values, rate): (&[f32], f64),
) -> Result<Pipeline, EngineError> {
    let holder: CompressorSpec = super::HOLDER.parse().map_err(|e| text(&e))?;
    let mut pipeline = Pipeline::new(&holder, layers, member);
    let step = Step { index: 0, learning_rate: rate };
    pipeline.compress(CpuGradient::F32(values), step, &mut Writer::new()).map_err(|e| text(&e))?;
    pipeline.change(strategy);
    Ok(pipeline)
}

impl OnDevice {
    /// Multiplies each layer's residual by its factor, by way of the host: relations of rates hardly ever change.
    fn rescale(&self, device: &impl Copies, layers: &CpuLayers, factors: &[f32]) -> Result<(), LaunchError> {
        let each = layers.ranges().zip(factors).flat_map(|(range, factor)| range.map(|_| *factor));
        let mut each = each.fuse();
        for span in self.layers.held_back() {
            let mut bytes = vec![0; span.bytes() as usize];
            device.download(span, &mut bytes)?;
            for (value, factor) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut each) {
                *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
            }
            device.upload(span, &bytes)?;
        }
        Ok(())
    }

    /// Waits, and makes the message of what the layers' kernels left; none where the gradient is not finite. `scaled`: each
    /// layer has a factor, which kernels leave at 1.
    fn fetch(
        &self,
        device: &impl Copies,
        (head, scaled): (Vec<u8>, bool),
        message: &mut Writer,
    ) -> Result<Option<Energy>, OnHost> {
        let mut said = vec![0; self.layers.outcomes().bytes() as usize];
        device.download(self.layers.outcomes(), &mut said)?;
        let each = said.chunks_exact(Layers::OUTCOME as usize).take(self.methods.len());
        let outcomes: Vec<Outcome> =
            each.filter_map(|bytes| bytes.first_chunk::<{ OUTCOME_BYTES as usize }>()).map(Outcome::read).collect();
        if outcomes.iter().any(|outcome| outcome.refused) {
            return Ok(None);
        }
        let (mut bytes, mut energy) = (head, Energy::default());
        let header = bytes.len();
        if scaled {
            let factors = outcomes.iter().map(|outcome| factor(Energy { sent: outcome.sent, fed: outcome.fed }));
            for factor in factors {
                if factor != 1.0 {
                    return Err(OnHost::Variance);
                }
                bytes.extend_from_slice(&factor.to_le_bytes());
            }
        }
        let (all, used) = (self.layers.payloads(), outcomes.iter().map(|outcome| outcome.bytes).sum::<u64>());
        // One copy, unless most of it would be gaps.
        let mut whole = vec![0; if all.bytes() <= 2 * used + 65_536 { all.bytes() as usize } else { 0 }];
        if !whole.is_empty() {
            device.download(all, &mut whole)?;
        }
        for (outcome, (at, room)) in outcomes.iter().zip(self.layers.places()) {
            let length = outcome.bytes.min(room);
            match whole.get(at as usize..(at + length) as usize) {
                Some(payload) => bytes.extend_from_slice(payload),
                None => {
                    let start = bytes.len();
                    bytes.resize(start + length as usize, 0);
                    device.download(all.part(at, length), &mut bytes[start..])?;
                }
            }
            energy = energy + Energy { sent: outcome.sent, fed: outcome.fed };
        }
        let length = (bytes.len() - header) as u64;
        bytes[16..24].copy_from_slice(&length.to_le_bytes());
        *message = Writer::from_vec(bytes);
        Ok(Some(energy))
    }

    /// `out += scale * ` what the payloads mean, in their order. False, and `out` is unspecified, where one is none: the host's
    /// reader then says why.
    fn add_all(
        &self,
        device: &impl Copies,
        (payloads, scale): (&[&[u8]], f32),
        out: Span,
    ) -> Result<bool, LaunchError> {
        if self.plan.decoding == Decoding::Vote {
            return self.vote(device, payloads, out);
        }
        for payload in payloads {
            let mut from = Reader::new(payload);
            let (mut at, alone) = (0, self.methods.len() == 1);
            for (n, method) in self.plan.lengths().into_iter().zip(&self.methods) {
                let out = out.part(4 * at, 4 * n);
                let room = alone.then_some(payload.len());
                if !self.add_layer(device, (*method, n), (&mut from, room), (scale, out))? {
                    return Ok(false);
                }
                at += n;
            }
            if from.finish().is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn vote(&self, device: &impl Copies, payloads: &[&[u8]], out: Span) -> Result<bool, LaunchError> {
        let (n, ranks) = (out.bytes() / 4, payloads.len() as u32);
        let length = n.div_ceil(8);
        let stride = self.room.bytes() / u64::from(ranks.max(1));
        for (rank, payload) in (0..).zip(payloads) {
            if payload.len() as u64 != length {
                return Ok(false);
            }
            device.upload(self.room.part(rank * stride, length), payload)?;
        }
        majority(device, n, (self.room, stride, ranks), out)?;
        Ok(true)
    }

    fn add_layer(
        &self,
        device: &impl Copies,
        (method, n): (Method, u64),
        (from, alone): (&mut Reader<'_>, Option<usize>),
        (scale, out): (f32, Span),
    ) -> Result<bool, LaunchError> {
        match self.plan.decoding {
            Decoding::Lists => return self.add_lists(device, n, from, (scale, out)),
            Decoding::Drawn => {
                let Method::RandomK(how) = method else { return Ok(false) };
                let values = self.room.part(0, 4 * how.k);
                let Ok(bytes) = from.take("values", 4 * how.k as usize) else { return Ok(false) };
                device.upload(values, bytes)?;
                let at = At { k: how.k, indices: self.layers.indices(how.k), values };
                return scatter(device, &at, (n, out), scale).map(|()| true);
            }
            _ => {}
        }
        // Of a length that depends on the values there is one alone.
        let length = match method {
            Method::ThreeLc(_) | Method::Quantize(Quantizer::Inceptionn { .. }, _) => alone.unwrap_or(0),
            _ => method.payload_bytes(n) as usize,
        };
        if length as u64 > method.payload_bytes(n) {
            return Ok(false);
        }
        let Ok(bytes) = from.take("payload", length) else { return Ok(false) };
        let payload = self.room.part(0, length as u64);
        device.upload(payload, bytes)?;
        let workspace = self.layers.workspace();
        match method {
            Method::ThreeLc(_) => three_lc::add(device, (payload, n), (scale, out), workspace)?,
            Method::Quantize(Quantizer::Inceptionn { bound }, _) => {
                add_sized(device, (bound, n), payload, (scale, out, workspace))?;
            }
            Method::Quantize(quantizer, _) => add(device, (quantizer, n), payload, (scale, out))?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn add_lists(
        &self,
        device: &impl Copies,
        n: u64,
        from: &mut Reader<'_>,
        (scale, out): (f32, Span),
    ) -> Result<bool, LaunchError> {
        let (Ok(k), mut indices) = (from.u32("number of values"), Vec::new()) else { return Ok(false) };
        if read_indices(from, n as usize, k as usize, &mut indices).is_err() {
            return Ok(false);
        }
        let Ok(bytes) = from.take("values", 4 * k as usize) else { return Ok(false) };
        let k = u64::from(k);
        let lists = self.room.part(0, 8 * k);
        if lists.bytes() < 8 * k {
            return Ok(false);
        }
        let at = At { k, indices: lists.part(0, 4 * k), values: lists.part(4 * k, 4 * k) };
        let named: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        device.upload(at.indices, &named)?;
        device.upload(at.values, bytes)?;
        scatter(device, &at, (n, out), scale)?;
        Ok(true)
    }
}
