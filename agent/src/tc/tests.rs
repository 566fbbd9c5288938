//! Properties of encoders and plans, without a kernel.

use super::codec::{self, HtbClass, Key, Message, Netem};
use super::plan::{self, Leaf, Paths, Root, Tree};
use super::shape::Shape;
use flexcomm_domain::{Bandwidth, Seconds};
use proptest::prelude::*;
use rtnetlink::packet_core::Parseable;
use rtnetlink::packet_route::tc::{TcAttribute, TcMessage};

fn shapes() -> impl Strategy<Value = Shape> {
    (0.0..=10.0f64, 0.0..=0.577f64, 0.0..=0.9f64, 3.0..=11.0f64).prop_map(|(delay, jitter, loss, rate)| Shape {
        delay: Seconds::new(delay).unwrap(),
        jitter: Seconds::new(delay * jitter).unwrap(),
        loss,
        rate: Bandwidth::new(10f64.powf(rate).clamp(1e3, 1e11)).unwrap(),
    })
}

fn leaves() -> impl Strategy<Value = Leaf> {
    prop_oneof![Just(Leaf::Netem), Just(Leaf::Fifo)]
}

fn controllers() -> impl Strategy<Value = Option<std::net::SocketAddr>> {
    let v4 = any::<([u8; 4], u16)>().prop_map(Into::into);
    let v6 = any::<([u8; 16], u16)>().prop_map(Into::into);
    prop_oneof![Just(None), v4.prop_map(Some), v6.prop_map(Some)]
}

fn messages(shape: &Shape, leaf: Leaf, controller: Option<std::net::SocketAddr>) -> Vec<Message> {
    plan::build(7, shape, leaf, Paths { controller, echo_port: 7071 })
}

proptest! {
    #[test]
    fn htb_class_round_trip(rate in 1u64.., ceil in 1u64.., rest in any::<[u32; 4]>()) {
        let [buffer, cbuffer, quantum, prio] = rest;
        let class = HtbClass { rate, ceil, buffer, cbuffer, quantum, prio };
        prop_assert_eq!(HtbClass::decode(&class.encode()), Some(class));
    }

    #[test]
    fn netem_round_trip(delay_ns in any::<u64>(), spread_ns in any::<u64>(), loss in any::<u32>(), limit in any::<u32>()) {
        let netem = Netem { delay_ns, spread_ns, loss, limit };
        prop_assert_eq!(Netem::decode(&netem.encode()), Some(netem));
    }

    #[test]
    fn filter_round_trip(class in any::<u32>(), keys in prop::collection::vec(any::<(i32, u32, u32)>(), 0..9)) {
        let keys: Vec<Key> =
            keys.into_iter().map(|(offset, mask, value)| Key { offset, mask, value: value & mask }).collect();
        prop_assert_eq!(codec::decode_u32_filter(&codec::u32_filter(class, &keys)), Some((class, keys)));
    }

    /// Any shape in range becomes messages that a decoder of other authors reads, with the values that were meant.
    #[test]
    fn every_shape_encodes(shape in shapes(), leaf in leaves(), controller in controllers()) {
        prop_assert!(shape.check().is_ok());
        let messages = messages(&shape, leaf, controller);
        let mut bytes = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            message.encode(i as u32 + 1, &mut bytes);
        }
        let frames: Vec<_> = codec::frames(&bytes).collect();
        prop_assert_eq!(frames.len(), messages.len());
        prop_assert!(bytes.len() < 16 * 1024, "one sendmsg: {} bytes", bytes.len());
        for (frame, message) in frames.iter().zip(&messages) {
            let ours = Message::decode(frame.message, frame.flags, frame.payload);
            prop_assert_eq!(ours.as_ref(), Some(message));
            let theirs = TcMessage::parse(frame.payload).unwrap();
            prop_assert_eq!(theirs.header.index, 7);
            prop_assert_eq!(u32::from(theirs.header.parent), message.parent);
            prop_assert_eq!(u32::from(theirs.header.handle), message.handle);
            prop_assert!(theirs.attributes.contains(&TcAttribute::Kind(message.kind.clone())));
        }
    }

    #[test]
    fn values_are_those_of_the_shape(shape in shapes()) {
        let messages = messages(&shape, Leaf::Netem, None);
        let class = |id| {
            let found = messages.iter().find(|m| m.message == codec::NEW_CLASS && m.handle == id).unwrap();
            HtbClass::decode(&found.options).unwrap()
        };
        let rate = (shape.rate.get() / 8.0).round();
        let (bulk, echo) = (class(plan::BULK), class(plan::ECHO));
        prop_assert_eq!((bulk.ceil, echo.ceil), (rate as u64, rate as u64));
        prop_assert_eq!((bulk.prio, echo.prio), (1, 0));
        prop_assert!(bulk.rate + echo.rate <= bulk.ceil && bulk.rate >= 1 && echo.rate >= 1);
        for class in [bulk, echo] {
            prop_assert!((1600..=200_000).contains(&class.quantum), "quantum {}", class.quantum);
            let burst = f64::from(class.cbuffer) * 64e-9 * class.ceil as f64;
            let wanted = (rate * 0.002).max(1600.0);
            // A burst of a tick too little is one of 64 ns; at 100 Gbit/s that is 800 bytes of 25 MB.
            prop_assert!((burst - wanted).abs() <= wanted * 1e-3 + 64e-9 * rate, "burst {burst} at {rate} B/s");
        }
        for parent in [plan::BULK, plan::ECHO] {
            let leaf = messages.iter().find(|m| m.parent == parent && m.kind == "netem").unwrap();
            let netem = Netem::decode(&leaf.options).unwrap();
            prop_assert!((netem.delay_ns as f64 * 1e-9 - shape.delay.get()).abs() <= 1e-9);
            prop_assert!((f64::from(netem.loss) / f64::from(u32::MAX) - shape.loss).abs() < 1e-9);
            prop_assert!((netem.spread_ns as f64 * 1e-9 - shape.jitter.get() * 3f64.sqrt()).abs() <= 1e-9);
            prop_assert!(netem.spread_ns <= netem.delay_ns + 1);
            let in_flight = (rate * shape.delay.get() / 1500.0).min(1e6);
            prop_assert!(f64::from(netem.limit) >= in_flight, "limit {} below {in_flight}", netem.limit);
        }
    }

    /// A change touches only classes and leaves, never root or filters, and deletes nothing.
    #[test]
    fn a_change_is_in_place(shape in shapes(), leaf in leaves()) {
        for message in plan::change(7, &shape, leaf) {
            prop_assert!(matches!(message.message, codec::NEW_CLASS | codec::NEW_QDISC));
            prop_assert_ne!(message.parent, codec::ROOT);
            prop_assert_eq!(message.flags & codec::FLAG_EXCL, 0);
        }
    }

    /// Nothing that the kernel could say makes the readers panic.
    #[test]
    fn readers_survive_garbage(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        for frame in codec::frames(&bytes) {
            let _ = Message::decode(frame.message, frame.flags, frame.payload);
        }
        let _ = (Message::decode(36, 0, &bytes), HtbClass::decode(&bytes), Netem::decode(&bytes));
        let _ = codec::attributes(&bytes).count();
    }
}

/// The class for everything else comes last: until then htb passes packets on as they come.
#[test]
fn bulk_is_built_last_and_the_root_first() {
    let shape = Shape::rate_only(Bandwidth::new(1e9).unwrap());
    let messages = messages(&shape, Leaf::Fifo, Some(([10, 0, 0, 1], 7070).into()));
    assert_eq!((messages[0].handle, messages[0].parent), (plan::OURS, codec::ROOT));
    let last: Vec<u32> = messages[messages.len() - 2..].iter().map(|m| m.parent).collect();
    assert_eq!(last[1], plan::BULK);
    assert!(messages[1..messages.len() - 2].iter().all(|m| m.handle != plan::BULK));
}

#[test]
fn roots_are_told_apart() {
    let qdisc = |kind: &str, handle, parent| Message {
        message: codec::NEW_QDISC,
        flags: 0,
        ifindex: 7,
        handle,
        parent,
        info: 0,
        kind: kind.to_owned(),
        options: vec![1],
    };
    let root = |kind, handle| Tree::from_dump(&[qdisc(kind, handle, codec::ROOT)]).root;
    assert_eq!(root("mq", 0), Root::Default("mq".into()));
    assert_eq!(root("htb", plan::OURS), Root::Ours);
    assert!(matches!(root("htb", 0x1_0000), Root::Foreign { .. }));
    assert!(matches!(root("fq", plan::OURS), Root::Foreign { .. }), "our number, but not our kind");
    assert_eq!(Tree::from_dump(&[]).root, Root::Default("noqueue".into()));
    let whole = [
        qdisc("htb", plan::OURS, codec::ROOT),
        qdisc("netem", 0xfc10_0000, plan::BULK),
        qdisc("netem", 0xfc30_0000, plan::ECHO),
    ];
    assert!(Tree::from_dump(&whole).netem);
    assert!(!Tree::from_dump(&whole[..2]).netem);
}
