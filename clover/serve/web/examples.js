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
  { title: "Solve", prompt: "Can you solve (81 + 37) * 3?", isThinking: true },
  {
    title: "Reckon",
    prompt: "Olga has 26 apples. Hugo gives Olga 14 more. How many apples does Olga have now?",
    isThinking: true,
  },
  { title: "Call a tool", prompt: "send the letter: recipient Olga, urgent true", tools: TOOLS },
  {
    title: "Write Python",
    prompt:
      "Write a Python function rocket(numbers) that returns the sorted list of the numbers below 5 (every one doubled).",
  },
  {
    title: "Shell",
    prompt:
      "The tree is:\nlemon/river.txt\nlemon/maple.txt\nGive 2 lines from the start of lemon/river.txt",
  },
  {
    title: "Fill in JSON",
    prompt:
      'Text: I saw a book [author: Lina, pages: 31].\nReply in JSON. Schema: {"type": "object", "properties": {"author": {"type": "string"}, "pages": {"type": "integer"}}, "required": ["author", "pages"]}',
  },
  {
    title: "Look up",
    prompt: "price list:\nAthens: 34\nLima: 56\nOslo: 54\nRome: 19\nWhat is the price of Lima?",
  },
  { title: "Sort", prompt: "Write in ascending order: 92, 61, 15, 47" },
];
