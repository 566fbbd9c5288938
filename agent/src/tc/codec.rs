//! Bytes of traffic control messages (rtnetlink), written and read by hand: htb, netem, pfifo and u32 are in no
//! crate. Pure: no socket here.

/// `RTM_NEWQDISC` and its neighbours.
pub(crate) const NEW_QDISC: u16 = 36;
pub(crate) const DEL_QDISC: u16 = 37;
pub(crate) const GET_QDISC: u16 = 38;
pub(crate) const NEW_CLASS: u16 = 40;
pub(crate) const NEW_FILTER: u16 = 44;

pub(crate) const FLAG_REQUEST: u16 = 0x1;
pub(crate) const FLAG_ACK: u16 = 0x4;
pub(crate) const FLAG_REPLACE: u16 = 0x100;
pub(crate) const FLAG_EXCL: u16 = 0x200;
pub(crate) const FLAG_DUMP: u16 = 0x300;
pub(crate) const FLAG_CREATE: u16 = 0x400;

/// `TC_H_ROOT`.
pub(crate) const ROOT: u32 = 0xffff_ffff;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const HEADER: usize = 16;
const TCMSG: usize = 20;
/// One tick of the packet scheduler's clock in nanoseconds (`PSCHED_SHIFT` 6).
pub(crate) const TICK_NS: u64 = 64;

/// One traffic control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// `RTM_*`.
    pub(crate) message: u16,
    /// `NLM_F_*` beside REQUEST and ACK.
    pub(crate) flags: u16,
    pub(crate) ifindex: u32,
    pub(crate) handle: u32,
    pub(crate) parent: u32,
    /// Priority and protocol, of filters only.
    pub(crate) info: u32,
    /// `htb`, `netem`, `pfifo`, `u32`; empty in requests for a dump or a deletion.
    pub(crate) kind: String,
    /// The bytes of `TCA_OPTIONS`; absent when empty.
    pub(crate) options: Vec<u8>,
}

impl Message {
    /// Appends the message with its sequence number, padded.
    pub(crate) fn encode(&self, sequence: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.message.to_ne_bytes());
        out.extend_from_slice(&(self.flags | FLAG_REQUEST | FLAG_ACK).to_ne_bytes());
        out.extend_from_slice(&sequence.to_ne_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&[0; 4]); // AF_UNSPEC and padding
        for word in [self.ifindex, self.handle, self.parent, self.info] {
            out.extend_from_slice(&word.to_ne_bytes());
        }
        if !self.kind.is_empty() {
            attribute(out, TCA_KIND, &[self.kind.as_bytes(), &[0]].concat());
        }
        if !self.options.is_empty() {
            attribute(out, TCA_OPTIONS, &self.options);
        }
        let length = (out.len() - start) as u32;
        out[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Reads the payload of a `RTM_*` message (without the netlink header); `None` when it is cut short.
    pub(crate) fn decode(message: u16, flags: u16, payload: &[u8]) -> Option<Self> {
        let mut decoded = Message {
            message,
            flags: flags & !(FLAG_REQUEST | FLAG_ACK),
            ifindex: u32_at(payload, 4)?,
            handle: u32_at(payload, 8)?,
            parent: u32_at(payload, 12)?,
            info: u32_at(payload, 16)?,
            kind: String::new(),
            options: Vec::new(),
        };
        for (kind, value) in attributes(payload.get(TCMSG..)?) {
            match kind {
                TCA_KIND => decoded.kind = text(value),
                TCA_OPTIONS => decoded.options = value.to_vec(),
                _ => {}
            }
        }
        Some(decoded)
    }
}

/// Appends one attribute, padded to four bytes.
pub(crate) fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    out.extend_from_slice(&((value.len() + 4) as u16).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Walks attributes; ends at the first that is cut short.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u16_at(bytes, 0)? as usize;
        let kind = u16_at(bytes, 2)? & 0x3fff; // without the nested and byte-order flags
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// One netlink message in a buffer: type, flags, sequence, payload.
pub(crate) struct Frame<'a> {
    pub(crate) message: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    pub(crate) payload: &'a [u8],
}

/// Walks the netlink messages of a datagram.
pub(crate) fn frames(mut bytes: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    std::iter::from_fn(move || {
        let length = u32_at(bytes, 0)? as usize;
        let frame = Frame {
            message: u16_at(bytes, 4)?,
            flags: u16_at(bytes, 6)?,
            sequence: u32_at(bytes, 8)?,
            payload: bytes.get(HEADER..length)?,
        };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(frame)
    })
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A NUL-terminated string of the kernel.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

/// Parameters of an htb class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HtbClass {
    /// Assured and highest rate in bytes/s.
    pub(crate) rate: u64,
    pub(crate) ceil: u64,
    /// Ticks of 64 ns that sending the burst takes, at the assured and at the highest rate.
    pub(crate) buffer: u32,
    pub(crate) cbuffer: u32,
    /// Bytes per turn among classes of one priority.
    pub(crate) quantum: u32,
    /// 0 goes first, up to 7.
    pub(crate) prio: u32,
}

const HTB_PARMS: u16 = 1;
const HTB_INIT: u16 = 2;
const HTB_RATE64: u16 = 6;
const HTB_CEIL64: u16 = 7;

impl HtbClass {
    /// The bytes of `TCA_OPTIONS`.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut parms = Vec::with_capacity(44);
        for rate in [self.rate, self.ceil] {
            // No rate table is sent, so the kernel must be told the link layer; it computes in 64 bits then.
            const ETHERNET: u8 = 1;
            parms.extend_from_slice(&[0, ETHERNET, 0, 0, 0, 0, 0, 0]);
            parms.extend_from_slice(&u32::try_from(rate).unwrap_or(u32::MAX).to_ne_bytes());
        }
        for word in [self.buffer, self.cbuffer, self.quantum, 0, self.prio] {
            parms.extend_from_slice(&word.to_ne_bytes());
        }
        let mut options = Vec::new();
        attribute(&mut options, HTB_PARMS, &parms);
        for (kind, rate) in [(HTB_RATE64, self.rate), (HTB_CEIL64, self.ceil)] {
            if rate >= u64::from(u32::MAX) {
                attribute(&mut options, kind, &rate.to_ne_bytes());
            }
        }
        options
    }

    /// Reads what [`HtbClass::encode`] or the kernel wrote.
    #[cfg(test)]
    pub(crate) fn decode(options: &[u8]) -> Option<Self> {
        let mut class = None;
        let (mut rate64, mut ceil64) = (None, None);
        for (kind, value) in attributes(options) {
            match kind {
                HTB_PARMS => {
                    class = Some(Self {
                        rate: u32_at(value, 8)?.into(),
                        ceil: u32_at(value, 20)?.into(),
                        buffer: u32_at(value, 24)?,
                        cbuffer: u32_at(value, 28)?,
                        quantum: u32_at(value, 32)?,
                        prio: u32_at(value, 40)?,
                    });
                }
                HTB_RATE64 => rate64 = u64_at(value, 0),
                HTB_CEIL64 => ceil64 = u64_at(value, 0),
                _ => {}
            }
        }
        let class = class?;
        Some(Self { rate: rate64.unwrap_or(class.rate), ceil: ceil64.unwrap_or(class.ceil), ..class })
    }
}

/// `TCA_OPTIONS` of the htb root; `default` is the minor number of the class for what no filter takes.
pub(crate) fn htb_root(default: u32) -> Vec<u8> {
    const VERSION: u32 = 3;
    const RATE_TO_QUANTUM: u32 = 10; // unused: every class names its quantum
    let words = [VERSION, RATE_TO_QUANTUM, default, 0, 0];
    let mut options = Vec::new();
    attribute(&mut options, HTB_INIT, &words.map(u32::to_ne_bytes).concat());
    options
}

/// Parameters of netem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Netem {
    pub(crate) delay_ns: u64,
    /// Half the width of the uniform spread.
    pub(crate) spread_ns: u64,
    /// Probability times 2^32 - 1.
    pub(crate) loss: u32,
    /// Packets in the queue, those in flight over the emulated link included.
    pub(crate) limit: u32,
}

const NETEM_LATENCY64: u16 = 10;
const NETEM_JITTER64: u16 = 11;

impl Netem {
    /// The bytes of `TCA_OPTIONS`: a bare struct first, attributes behind it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let ticks = |ns: u64| u32::try_from(ns / TICK_NS).unwrap_or(u32::MAX);
        let words = [ticks(self.delay_ns), self.limit, self.loss, 0, 0, ticks(self.spread_ns)];
        let mut options = words.map(u32::to_ne_bytes).concat();
        attribute(&mut options, NETEM_LATENCY64, &self.delay_ns.to_ne_bytes());
        attribute(&mut options, NETEM_JITTER64, &self.spread_ns.to_ne_bytes());
        options
    }

    /// Reads what [`Netem::encode`] or the kernel wrote.
    #[cfg(test)]
    pub(crate) fn decode(options: &[u8]) -> Option<Self> {
        let mut netem = Self {
            delay_ns: u64::from(u32_at(options, 0)?) * TICK_NS,
            limit: u32_at(options, 4)?,
            loss: u32_at(options, 8)?,
            spread_ns: u64::from(u32_at(options, 20)?) * TICK_NS,
        };
        for (kind, value) in attributes(options.get(24..)?) {
            match kind {
                NETEM_LATENCY64 => netem.delay_ns = u64_at(value, 0)?,
                NETEM_JITTER64 => netem.spread_ns = u64_at(value, 0)?,
                _ => {}
            }
        }
        Some(netem)
    }
}

/// `TCA_OPTIONS` of pfifo.
pub(crate) fn pfifo(limit: u32) -> Vec<u8> {
    limit.to_ne_bytes().to_vec()
}

/// One comparison of a u32 filter: the big-endian word at `offset` from the network header, under `mask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) offset: i32,
    pub(crate) mask: u32,
    pub(crate) value: u32,
}

const U32_CLASSID: u16 = 1;
const U32_SEL: u16 = 5;

/// `TCA_OPTIONS` of a u32 filter that sends what matches all keys to a class. At most 128 keys.
pub(crate) fn u32_filter(class: u32, keys: &[Key]) -> Vec<u8> {
    const TERMINAL: u8 = 1;
    let mut selector = vec![TERMINAL, 0, keys.len() as u8];
    selector.resize(16, 0);
    for key in keys {
        selector.extend_from_slice(&key.mask.to_be_bytes());
        selector.extend_from_slice(&(key.value & key.mask).to_be_bytes());
        selector.extend_from_slice(&key.offset.to_ne_bytes());
        selector.extend_from_slice(&0i32.to_ne_bytes());
    }
    let mut options = Vec::new();
    attribute(&mut options, U32_CLASSID, &class.to_ne_bytes());
    attribute(&mut options, U32_SEL, &selector);
    options
}

/// Reads what [`u32_filter`] wrote.
#[cfg(test)]
pub(crate) fn decode_u32_filter(options: &[u8]) -> Option<(u32, Vec<Key>)> {
    let find = |wanted| attributes(options).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let selector = find(U32_SEL)?;
    let word = |at: usize| Some(u32::from_be_bytes(selector.get(at..at + 4)?.try_into().ok()?));
    let keys = (0..usize::from(selector[2])).map(|i| {
        let at = 16 + 16 * i;
        Some(Key { mask: word(at)?, value: word(at + 4)?, offset: u32_at(selector, at + 8)? as i32 })
    });
    Some((u32_at(find(U32_CLASSID)?, 0)?, keys.collect::<Option<_>>()?))
}

/// Handle in tc's notation: `fc01:` or `fc01:10`.
pub(crate) fn handle_text(handle: u32) -> String {
    match (handle >> 16, handle & 0xffff) {
        (major, 0) => format!("{major:x}:"),
        (major, minor) => format!("{major:x}:{minor:x}"),
    }
}
