// What clover-nano can do, in words that it has learned.

export const TOOLS = [
  {
    type: "function",
    function: {
      name: "book_hotel",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string" },
          guest: { type: "string" },
          days: { type: "integer" },
        },
        required: ["city"],
      },
    },
  },
  {
    type: "function",
    function: {
      name: "send_letter",
      parameters: {
        type: "object",
        properties: {
          recipient: { type: "string" },
          urgent: { type: "boolean" },
        },
        required: ["recipient"],
      },
    },
  },
];

export const EXAMPLES = [
  { title: "Add", prompt: "What is 47 + 38?", isThinking: true },
  { title: "Subtract", prompt: "How much is 5170 minus 3749?", isThinking: true },
  { title: "Sort", prompt: "Arrange from Z to A: quilt, koala, amber, rabbit, candle, ribbon" },
  { title: "Reverse", prompt: "Sort these numbers backwards: 92, 61, 15, 93, 47, 66" },
  {
    title: "Look up",
    prompt: "price list:\nAthens: 34\nLima: 56\nOslo: 54\nRome: 19\nWhat is the price of Lima?",
  },
  { title: "Call a tool", prompt: "send the letter: recipient Olga, urgent true", tools: TOOLS },
];
