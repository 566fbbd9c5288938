//! From what stands under an interface and what is wanted to the messages that get there. Pure.

use super::codec::{self, HtbClass, Key, Message, Netem, ROOT, TICK_NS};
use super::shape::{Shape, UNIFORM_HALF_WIDTH};
use std::net::{IpAddr, SocketAddr};

/// Our root qdisc, `fc01:`.
pub(crate) const OURS: u32 = 0xfc01_0000;
/// The shaped link, the parent of bulk and echo.
const LINK: u32 = OURS | 0x1;
/// Everything that no filter takes.
pub(crate) const BULK: u32 = OURS | 0x10;
/// To and from the controller.
const CONTROL: u32 = OURS | 0x20;
/// Echo packets.
pub(crate) const ECHO: u32 = OURS | 0x30;
/// A handle nobody uses, to ask the kernel whether it knows a kind.
const PROBE: u32 = 0xfcff_0000;

/// The controller's class: far above any rate we shape to, so nothing waits there.
const CONTROL_RATE: u64 = 125_000_000_000;
/// The echo class is assured a 64th of the link: enough for its packets at every rate we shape to, and no more, since
/// what it is assured bulk traffic was seen not to borrow in full.
const ECHO_SHARE: u64 = 64;
/// A class may send this long at its rate at once: above the timer's lateness, below what a measurement sees.
const BURST_S: f64 = 0.002;
/// Least burst in bytes: one full Ethernet frame with its VLAN tags.
const LEAST_BURST: u64 = 1600;
/// Largest turn among classes of one priority, in bytes: three GSO packets.
const MOST_QUANTUM: u64 = 200_000;
/// Room in the queue beyond the packets in flight, in seconds at the set rate.
const QUEUE_S: f64 = 0.1;
/// Bytes of a packet when the queue's limit in packets is worked out.
const PACKET: f64 = 1500.0;
/// Least and largest limit of a leaf's queue in packets. The largest bounds memory to about 2 GB.
const LEAST_LIMIT: f64 = 256.0;
const MOST_LIMIT: f64 = 1_000_000.0;

/// The kind of queue at the leaves: netem wherever the kernel has it, so that later changes happen in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaf {
    Netem,
    Fifo,
}

/// What stands under an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Root {
    /// Nothing that someone set: what the kernel makes by itself (handle `0:`), by name.
    Default(String),
    /// A tree with our handle.
    Ours,
    /// Somebody's qdisc.
    Foreign { kind: String, handle: u32, options: Vec<u8> },
}

/// What the kernel says about an interface's qdiscs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) root: Root,
    /// Whether both leaves of our tree are netem.
    pub(crate) netem: bool,
}

impl Tree {
    /// From the dump of qdiscs of one interface.
    pub(crate) fn from_dump(qdiscs: &[Message]) -> Self {
        let leaf = |parent| qdiscs.iter().any(|q| q.parent == parent && q.kind == "netem");
        let root = match qdiscs.iter().find(|q| q.parent == ROOT) {
            None => Root::Default("noqueue".to_owned()),
            Some(q) if q.handle >> 16 == 0 => Root::Default(q.kind.clone()),
            Some(q) if q.handle == OURS && q.kind == "htb" => Root::Ours,
            Some(q) => Root::Foreign { kind: q.kind.clone(), handle: q.handle, options: q.options.clone() },
        };
        Self { netem: root == Root::Ours && leaf(BULK) && leaf(ECHO), root }
    }
}

/// What does not change over a shaper's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paths {
    pub(crate) controller: Option<SocketAddr>,
    pub(crate) echo_port: u16,
}

/// Builds our tree over a default root, or in place of one that the caller knows how to put back. Until the last
/// class stands, htb passes unclassified packets on as they come, so no packet waits for the tree to be whole.
pub(crate) fn build(ifindex: u32, shape: &Shape, leaf: Leaf, paths: Paths) -> Vec<Message> {
    let create = codec::FLAG_CREATE | codec::FLAG_REPLACE;
    let at = Under { ifindex };
    let root = at.message(codec::NEW_QDISC, create, (OURS, ROOT), ("htb", codec::htb_root(BULK & 0xffff)));
    let control = HtbClass::new(CONTROL_RATE, CONTROL_RATE, 0);
    let control = at.message(codec::NEW_CLASS, create, (CONTROL, OURS), ("htb", control.encode()));
    let mut messages = vec![root, control];
    let mut change = change(ifindex, shape, leaf);
    let bulk = change.split_off(change.len() - 2);
    messages.extend(change);
    messages.extend(filters(&at, paths));
    messages.extend(bulk);
    messages
}

/// Changes our tree in place: classes and leaves keep what they hold. The last two messages are bulk's.
pub(crate) fn change(ifindex: u32, shape: &Shape, leaf: Leaf) -> Vec<Message> {
    let create = codec::FLAG_CREATE | codec::FLAG_REPLACE;
    let at = Under { ifindex };
    let rate = ((shape.rate.get() / 8.0).round() as u64).max(1);
    let echo = (rate / ECHO_SHARE).max(1);
    let class =
        |id, parent, class: HtbClass| at.message(codec::NEW_CLASS, create, (id, parent), ("htb", class.encode()));
    let queue = |class: u32| {
        let (major, kind, options) = match leaf {
            Leaf::Netem => (0xfc00_0000, "netem", Netem::of(shape).encode()),
            Leaf::Fifo => (0xfd00_0000, "pfifo", codec::pfifo(limit(shape))),
        };
        at.message(codec::NEW_QDISC, create, (major | (class & 0xff) << 16, class), (kind, options))
    };
    vec![
        class(LINK, OURS, HtbClass::new(rate, rate, 0)),
        class(ECHO, LINK, HtbClass::new(echo, rate, 0)),
        queue(ECHO),
        class(BULK, LINK, HtbClass::new((rate - echo).max(1), rate, 1)),
        queue(BULK),
    ]
}

/// Deletes our root; the kernel refuses when another qdisc has taken its place, and makes its default again.
pub(crate) fn remove(ifindex: u32) -> Message {
    Under { ifindex }.message(codec::DEL_QDISC, 0, (OURS, ROOT), ("", Vec::new()))
}

/// Puts a foreign qdisc back in place of ours, in one step.
pub(crate) fn put_back(ifindex: u32, kind: &str, handle: u32, options: &[u8]) -> Message {
    let flags = codec::FLAG_CREATE | codec::FLAG_REPLACE;
    Under { ifindex }.message(codec::NEW_QDISC, flags, (handle, ROOT), (kind, options.to_vec()))
}

/// Asks whether the kernel knows htb or netem: without options it looks the kind up (loading its module), then
/// refuses for want of options (EINVAL) before anything changes; an unknown kind is ENOENT.
pub(crate) fn probe(ifindex: u32, kind: &str, parent: u32) -> Message {
    let flags = codec::FLAG_CREATE | codec::FLAG_REPLACE;
    Under { ifindex }.message(codec::NEW_QDISC, flags, (PROBE, parent), (kind, Vec::new()))
}

/// netem alone at the root, to see whether the kernel has it.
pub(crate) fn netem_root(ifindex: u32, shape: &Shape) -> Message {
    put_back(ifindex, "netem", PROBE, &Netem::of(shape).encode())
}

struct Under {
    ifindex: u32,
}

impl Under {
    fn message(&self, message: u16, flags: u16, ids: (u32, u32), content: (&str, Vec<u8>)) -> Message {
        let (handle, parent) = ids;
        let (kind, options) = content;
        Message { message, flags, ifindex: self.ifindex, handle, parent, info: 0, kind: kind.to_owned(), options }
    }

    fn filter(&self, protocol: Protocol, class: u32, keys: &[Key]) -> Message {
        // One priority per protocol: the kernel keeps filters of different protocols apart.
        let info = (protocol.priority() << 16) | u32::from((protocol as u16).to_be());
        let flags = codec::FLAG_CREATE | codec::FLAG_EXCL;
        let content = ("u32", codec::u32_filter(class, keys));
        Message { info, ..self.message(codec::NEW_FILTER, flags, (0, OURS), content) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Ipv4 = 0x0800,
    Arp = 0x0806,
    Ipv6 = 0x86dd,
}

impl Protocol {
    fn priority(self) -> u32 {
        match self {
            Self::Arp => 1,
            Self::Ipv4 => 2,
            Self::Ipv6 => 3,
        }
    }
}

const fn key(offset: i32, mask: u32, value: u32) -> Key {
    Key { offset, mask, value }
}

fn filters(at: &Under, paths: Paths) -> Vec<Message> {
    const DSCP_CS6: u32 = 0xc0;
    let mut filters = Vec::new();
    if let Some(controller) = paths.controller {
        filters.extend(to_and_from(at, controller));
    }
    let port = u32::from(paths.echo_port);
    for (mask, value) in [(0x0000_ffff, port), (0xffff_0000, port << 16)] {
        let ports = key(20, mask, value);
        filters.push(at.filter(Protocol::Ipv4, ECHO, &[V4_PLAIN, key(8, 0xff_0000, 17 << 16), V4_WHOLE, ports]));
        filters.push(at.filter(Protocol::Ipv6, ECHO, &[key(4, 0xff00, 17 << 8), Key { offset: 40, ..ports }]));
    }
    filters.push(at.filter(Protocol::Ipv4, ECHO, &[key(0, 0x00fc_0000, DSCP_CS6 << 16)]));
    filters.push(at.filter(Protocol::Ipv6, ECHO, &[key(0, 0x0fc0_0000, DSCP_CS6 << 20)]));
    filters
}

/// IPv4 without options, so that ports lie at 20; not a later fragment, which has no ports.
const V4_PLAIN: Key = key(0, 0xff00_0000, 0x4500_0000);
const V4_WHOLE: Key = key(4, 0x0000_1fff, 0);

/// TCP to and from the controller, and what finds its hardware address: an ARP or neighbour message that waits or
/// is lost in the shaped class would take the controller with it.
fn to_and_from(at: &Under, controller: SocketAddr) -> Vec<Message> {
    const TCP: u32 = 6;
    let port = u32::from(controller.port());
    let (from, to) = ((0xffff_0000, port << 16), (0x0000_ffff, port));
    let mut filters = vec![at.filter(Protocol::Arp, CONTROL, &[key(0, 0, 0)])];
    match controller.ip().to_canonical() {
        IpAddr::V4(ip) => {
            for (offset, (mask, value)) in [(12, from), (16, to)] {
                let address = key(offset, u32::MAX, ip.to_bits());
                let tcp = key(8, 0xff_0000, TCP << 16);
                filters.push(at.filter(
                    Protocol::Ipv4,
                    CONTROL,
                    &[V4_PLAIN, tcp, V4_WHOLE, address, key(20, mask, value)],
                ));
            }
        }
        IpAddr::V6(ip) => {
            const ICMPV6: u32 = 58;
            let bits = ip.to_bits();
            for (offset, (mask, value)) in [(8, from), (24, to)] {
                let mut keys = vec![key(4, 0xff00, TCP << 8), key(40, mask, value)];
                keys.extend((0..4).map(|i| key(offset + 4 * i, u32::MAX, (bits >> (96 - 32 * i)) as u32)));
                filters.push(at.filter(Protocol::Ipv6, CONTROL, &keys));
            }
            for solicitation_or_advertisement in [135u32, 136] {
                let kind = key(40, 0xff00_0000, solicitation_or_advertisement << 24);
                filters.push(at.filter(Protocol::Ipv6, CONTROL, &[key(4, 0xff00, ICMPV6 << 8), kind]));
            }
        }
    }
    filters
}

impl HtbClass {
    /// Burst and quantum chosen for a rate and ceiling in bytes/s.
    pub(crate) fn new(rate: u64, ceil: u64, prio: u32) -> Self {
        let burst = ((ceil as f64 * BURST_S) as u64).max(LEAST_BURST);
        let quantum = burst.clamp(LEAST_BURST, MOST_QUANTUM) as u32;
        Self { rate, ceil, buffer: ticks(burst, rate), cbuffer: ticks(burst, ceil), quantum, prio }
    }
}

/// Ticks that `bytes` take at `rate` bytes/s; at least 1, at most what 32 bits hold (275 s).
fn ticks(bytes: u64, rate: u64) -> u32 {
    let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    u32::try_from(nanoseconds / u128::from(TICK_NS)).unwrap_or(u32::MAX).max(1)
}

impl Netem {
    /// netem's parameters for a shape that passed its check.
    pub(crate) fn of(shape: &Shape) -> Self {
        let nanoseconds = |seconds: f64| (seconds * 1e9).round() as u64;
        Self {
            delay_ns: nanoseconds(shape.delay.get()),
            spread_ns: nanoseconds(shape.jitter.get() * UNIFORM_HALF_WIDTH),
            loss: (shape.loss * f64::from(u32::MAX)).round() as u32,
            limit: limit(shape),
        }
    }
}

/// Packets the queue takes: twice what is in flight over the link, and a tenth of a second more. netem counts the
/// packets that travel as waiting ones, so a small limit would drop below the bandwidth-delay product.
fn limit(shape: &Shape) -> u32 {
    let seconds = 2.0 * (shape.delay.get() + shape.jitter.get() * UNIFORM_HALF_WIDTH) + QUEUE_S;
    (shape.rate.get() / 8.0 * seconds / PACKET).ceil().clamp(LEAST_LIMIT, MOST_LIMIT) as u32
}
